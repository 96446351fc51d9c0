"""Shape annotations such as ``Float[Tensor, "B T C"]``: checked in the tests, plain Tensor to everyone else.

Letters: B batch, T time, C model width, H query heads, G key/value heads, D head width, E experts, K experts used,
V vocabulary, N tokens of a flattened batch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:  # jaxtyping belongs to the dev extra; without it an annotation is its first word

        class Float:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Int = Float

__all__ = ["Bool", "Float", "Int"]
