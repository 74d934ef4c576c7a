"""Coded ring (CERAR): N tokens walk around the ranks until each rank can solve for the sum.

Token k starts at rank k.  On each visit a rank adds what it has for that visit, and passes the
token on; from hop N-1 on it also keeps what it saw, as an equation.  After c+N-2 rounds it has R
equations for the R = c/N components of each token (see `mpiquant.collectives.coding`).

Cost: (c+N-2) (alpha + d/c beta), d values in c components: less traffic than a ring, and more
steps.  The result is an approximation, and not the same on all ranks.  Source: the published
descriptions of CERAR.
"""

from __future__ import annotations

from typing import NamedTuple


class Visit(NamedTuple):
    """A token on a rank."""

    token: int
    number: int
    """0 when it comes for the first time."""
    received: bool
    """Whether it came from the left; else it starts here."""
    sent: bool
    """Whether it goes on to the right."""


def visits(rank: int, size: int, components: int) -> list[Visit]:
    """What a rank does, in order."""
    rounds = components + size - 2
    return [
        Visit((rank - hop) % size, hop // size, hop > 0, hop < rounds) for hop in range(rounds + 1)
    ]


class Layout(NamedTuple):
    """Where components are in an array.

    All have one length, but for the last ones, behind the end of the array: what lacks there is 0.
    Component m of token k = m mod N is element m * length + i for i below the token's length.
    """

    elements: int
    size: int
    components: int

    @property
    def length(self) -> int:
        """Values of a component."""
        return -(-self.elements // self.components)

    def token_length(self, token: int) -> int:
        """Values of a token: those of its first component."""
        return max(0, min(self.length, self.elements - token * self.length))

    def present(self, component: int) -> slice:
        """Elements of a component that there are."""
        begin = min(component * self.length, self.elements)
        return slice(begin, min(begin + self.length, self.elements))
