"""The sizes at which a finding can be rebuilt, from two CPU cores to the paper's own."""

from __future__ import annotations

from gatedlm.findings.finding import Scale

_TEXT = ("recipe=quickstart", "gate=none")
_SINK = ("recipe=sink",)
# As in the paper's mixture of experts there are fewer key/value than query heads, so that each row of Table 1 differs
_TINY_MOE = (
    "scale=tiny-moe",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=16",
    "data.batch=8",
    "trainer.steps=300",
)
# Tables want the end of a run; what happens on the way is asked for by the findings that show it
_BRIEF = ("trainer.val_every=0", "trainer.val_batches=20", "trainer.probe_every=0", "trainer.keep=1")

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "tiny",
            {
                "dense": (*_TEXT, "scale=tiny", *_BRIEF),
                "moe": (*_TEXT, *_TINY_MOE, *_BRIEF),
                "backcopy": (*_SINK, "trainer.keep=1"),
            },
            rates=(1e-2, 3e-2),
            sweep=(3e-3, 1e-2, 3e-2, 1e-1),
            multiple=8,
            speed=2.6e10,
            layer=6e-3,
        ),
        Scale(
            "small",
            {
                "dense": ("recipe=dense-50m", "gate=none"),
                "moe": ("recipe=moe-300m", "gate=none"),
                "backcopy": (*_SINK, "trainer.steps=10_000", "trainer.threads=0"),
            },
            rates=(2e-3, 8e-3),
            sweep=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
            multiple=64,
            speed=1e14,
        ),
        Scale(
            "medium",
            {
                "dense": ("recipe=dense-500m", "gate=none"),
                "moe": ("recipe=moe-1b", "gate=none"),
            },
            rates=(2e-3, 6e-3),
            sweep=(1e-3, 2e-3, 4e-3, 6e-3, 8e-3),
            multiple=128,
            speed=2e15,
        ),
        Scale(
            "full",
            {
                "dense": ("recipe=dense-1.7b-48l", "gate=none"),
                "moe": ("recipe=moe-15a2b", "gate=none"),
            },
            rates=(4e-3, 8e-3),
            sweep=(2e-3, 4e-3, 8e-3),
            multiple=128,
            speed=2e16,
        ),
    )
}
