"""Tilings of the MX kernel among which ``kernels.tuning`` chooses."""

from typing import NamedTuple

LONGEST_FUSED = 64
"""Block of the longest transform for which one kernel may write both directions."""


class Tiling(NamedTuple):
    """Entries and threads of a program."""

    rows: int
    columns: int
    warps: int
    registers: int | None  # limit of a thread, where more resident warps outweigh some spilling

    def programs(self, M: int, N: int) -> int:
        """Number of programs that cover [M, N]."""
        return -(-M // self.rows) * -(-N // self.columns)


_OF_SHORT_ROWS = ((4, 512, 1), (8, 512, 2), (4, 256, 1), (8, 512, 1))


def tilings_of(group: int, rows: bool, columns: bool, transformed: bool, stochastic: bool) -> tuple[Tiling, ...]:
    """Candidate tiles of a program, about one group a thread, whole groups in each direction; fastest on an H200 first.

    Programs have few warps, since warps share no data; docs/design/kernels.md lists the alternatives tried.
    """
    sizes: tuple[tuple[int, int, int], ...]
    if group <= 16:  # several groups a thread share addresses and the tensor's scale
        sizes = ((16, 64, 1), (16, 128, 2), (16, 128, 1), (16, 256, 2)) if columns else _OF_SHORT_ROWS
        return tuple(Tiling(*size, None) for size in sizes)
    if group > LONGEST_FUSED:  # programs of one warp first: two wait at a barrier for each part of their exchange
        sizes = ((group, 32, 1), (group, 64, 2)) if columns else ((32, group, 1), (4, group * 8, 1))
        return tuple(Tiling(*size, None) for size in sizes)
    limit = 128 if transformed and stochastic else None
    if rows and columns:
        first = Tiling(group, 64, 2, limit) if transformed or stochastic else Tiling(group, 128, 4, limit)
    elif columns:
        first = Tiling(group, 32, 1, limit) if stochastic and transformed else Tiling(group, 64, 1 + transformed, limit)
    else:
        first = Tiling(8, group * 8, 2, limit) if transformed else Tiling(4, group * 8, 1, limit)
    others = [first._replace(registers=None), first._replace(columns=first.columns * 2, warps=first.warps * 2)]
    if rows and columns:
        others.append(first._replace(columns=max(group, first.columns // 2)))
        if group <= 32:
            others.append(Tiling(group, 64, 1, limit))
    elif columns:
        others.append(first._replace(columns=max(32, first.columns // 2)))
    else:
        others.append(first._replace(rows=first.rows * 2, warps=first.warps * 2))
        # one warp exchanges no data through shared memory; two short groups a thread share addresses and masks
        others.append(Tiling(4, 512, 1, limit))
    return tuple(dict.fromkeys((first, *others)))
