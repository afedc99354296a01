"""The linear layers of a small model, as sites that a recipe reaches."""

from megatron_lowprec.recipe.coverage import LinearSite


def sites_of(layers: int, hidden: int = 512, ffn: int = 2048) -> list[LinearSite]:
    return [
        LinearSite(layer, name, inputs, outputs, split)  # type: ignore[arg-type]
        for layer in range(1, layers + 1)
        for name, inputs, outputs, split in (
            ("self_attention.linear_qkv", hidden, 3 * hidden, "column"),
            ("self_attention.linear_proj", hidden, hidden, "row"),
            ("mlp.linear_fc1", hidden, ffn, "column"),
            ("mlp.linear_fc2", ffn, hidden, "row"),
        )
    ]
