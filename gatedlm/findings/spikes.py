"""A search for a small setting whose loss spikes tell the gated model from the baseline (Figure 1, Section 4.1)."""

from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, by_seed, minus

GATED = "SDPA elementwise"
ARMS = {"baseline": ("gate=none",), GATED: ("gate=sdpa-elementwise",)}
_SMALL = ("scale=nano", "model.layers=4", "data.context=64", "data.batch=8", "trainer.steps=1000", "optim.warmup=50")
_WATCHED = ("optim.schedule=constant", "trainer.checkpoint_every=0", "trainer.val_batches=5", "spikes.skip=100")
_NO_NORM, _NO_CLIP, _SLOW = "model.qk_norm=false", "optim.clip=0", "optim.betas=[0.9,0.999]"
_COPY = ("data=backcopy", "data.max_tokens=0")
_EXPERTS = ("model.experts.count=8", "model.ffn=48")
UNIT = "events per 1000 steps fewer"

SETTINGS: dict[str, tuple[str, ...]] = {
    "text lr=1e-2": ("optim.lr=1e-2",),
    "text lr=3e-2": ("optim.lr=3e-2",),
    "text lr=1e-1": ("optim.lr=1e-1",),
    "text lr=1e-2 no QK-norm": ("optim.lr=1e-2", _NO_NORM),
    "text lr=3e-2 no QK-norm": ("optim.lr=3e-2", _NO_NORM),
    "text lr=3e-2 no clip": ("optim.lr=3e-2", _NO_CLIP),
    "text lr=1e-2 beta2=0.999": ("optim.lr=1e-2", _SLOW),
    "text lr=3e-2 beta2=0.999 no clip": ("optim.lr=3e-2", _SLOW, _NO_CLIP),
    "text lr=1e-2 no QK-norm beta2=0.999 no clip": ("optim.lr=1e-2", _NO_NORM, _SLOW, _NO_CLIP),
    "text lr=1e-2 8 layers": ("optim.lr=1e-2", "model.layers=8"),
    "text lr=1e-2 8 layers no QK-norm beta2=0.999 no clip": (
        "optim.lr=1e-2",
        "model.layers=8",
        _NO_NORM,
        _SLOW,
        _NO_CLIP,
    ),
    "text lr=3e-2 bf16": ("optim.lr=3e-2", "trainer.precision=bf16"),
    "text lr=3e-2 batch 32": ("optim.lr=3e-2", "data.batch=32", "trainer.steps=500"),
    "text lr=1e-2 batch 2": ("optim.lr=1e-2", "data.batch=2"),
    "text lr=5e-3 4000 steps no QK-norm beta2=0.999 no clip": (
        "optim.lr=5e-3",
        "trainer.steps=4000",
        _NO_NORM,
        _SLOW,
        _NO_CLIP,
    ),
    "backcopy lr=1e-2 beta2=0.999 no clip": (*_COPY, "optim.lr=1e-2", _SLOW, _NO_CLIP),
    "backcopy lr=1e-2 no QK-norm beta2=0.999 no clip": (*_COPY, "optim.lr=1e-2", _NO_NORM, _SLOW, _NO_CLIP),
    "backcopy lr=2e-2 no QK-norm beta2=0.999 no clip": (*_COPY, "optim.lr=2e-2", _NO_NORM, _SLOW, _NO_CLIP),
    "experts lr=1e-2": (*_EXPERTS, "optim.lr=1e-2"),
    "experts lr=3e-2 beta2=0.999 no clip": (*_EXPERTS, "optim.lr=3e-2", _SLOW, _NO_CLIP),
}
# On a GPU: the rates of the stability study, where the paper's spikes should come of themselves
LARGE = {
    "no clip": (_NO_CLIP, "trainer.log_every=1"),
    "no QK-norm no clip": (_NO_NORM, _NO_CLIP, "trainer.log_every=1"),
}


def settings(scale: Scale) -> dict[str, tuple[str, ...]]:
    """What the search tries at a scale: two CPU cores look far, larger machines where the paper saw spikes."""
    if scale.name == "tiny":
        return {name: (*_SMALL, *_WATCHED, *words) for name, words in SETTINGS.items()}
    return {
        f"text lr={rate:g} {name}": (f"optim.lr={rate:g}", *words)
        for rate in scale.sweep
        for name, words in LARGE.items()
    }


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Both arms of each setting, one after the other."""
    return [
        Row(f"{setting}: {arm}", (*words, *gate), against=f"{setting}: baseline")
        for setting, words in settings(scale).items()
        for arm, gate in ARMS.items()
    ]


def events(table: Table) -> list[list[dict[int, float]]]:
    """Spike events per thousand steps by seed: of each setting the baseline's and the gated model's."""
    per_row = [table.finals(row.label, "spikes_per_thousand") for row in table.rows]
    return [per_row[place : place + len(ARMS)] for place in range(0, len(per_row), len(ARMS))]


def _fewer(table: Table) -> dict[int, float]:
    return by_seed([minus(*arms) for arms in events(table)])


def _fewer_where_most(table: Table) -> dict[int, float]:
    """Of the setting with most spikes, both arms taken together; none where nothing spiked."""
    most = max(events(table), key=_total)
    return minus(*most) if _total(most) else {}


def _total(arms: list[dict[int, float]]) -> float:
    return sum(sum(of_seed.values()) for of_seed in arms)


FINDING = Finding(
    "spikes",
    "Spikes: a search for a small setting that tells the arms apart",
    "dense",
    rows,
    columns=("spikes_per_thousand", "recovery", "m_act"),
    paper=(),
    claims=(
        Claim("over all settings the gated model's loss spikes less", _fewer, UNIT, "medium"),
        Claim("so it does in the setting that spikes most, both arms counted", _fewer_where_most, UNIT, "medium"),
    ),
    notes="A spike stands more than 0.2 nats and more than six robust standard deviations above the median of the 50 "
    "steps before it; recovery is how many steps an event lasts. Both arms of a setting see the same batches. A "
    "setting that is picked from many because its arms differ counts if they differ again with other seeds.",
)
