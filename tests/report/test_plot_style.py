"""A recipe looks the same everywhere, and unlike the others."""

from megatron_lowprec import recipes
from megatron_lowprec.report.plot_style import DARK, LIGHT, styles


def test_no_two_recipes_look_alike() -> None:
    labels = [*recipes(), "rht32_sr", "rht128_sr"]
    found = styles(labels, "bf16")
    assert len({(look.paint(LIGHT), look.dashes) for look in found.values()}) == len(labels)
    assert found["bf16"].paint(LIGHT) == LIGHT.muted
    assert found["bf16"].paint(DARK) == DARK.muted


def test_the_best_known_keep_their_colour_whatever_is_beside_them() -> None:
    few = styles(["bf16", "mxfp4_rht_sr", "other"], "bf16")
    many = styles(["bf16", "one", "two", "mxfp4", "three", "mxfp4_rht_sr"], "bf16")
    assert few["mxfp4_rht_sr"].paint(LIGHT) == many["mxfp4_rht_sr"].paint(LIGHT) == "#0072b2"
    assert few["other"].paint(LIGHT) not in (few["mxfp4_rht_sr"].paint(LIGHT), LIGHT.muted)


def test_dark_pages_have_lighter_colours() -> None:
    look = styles(["mxfp4_rht_sr"], "bf16")["mxfp4_rht_sr"]
    assert look.paint(DARK) == "#4c9cc9"
