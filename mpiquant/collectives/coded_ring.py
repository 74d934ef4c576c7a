"""Coded ring (CERAR): N tokens walk around the ranks until each rank can solve for the sum.

Token k starts at rank k.  On each visit a rank adds what it has for that visit, and passes the
token on; from hop N-1 on it also keeps what it saw, as an equation.  After c+N-2 rounds it has as
many equations for the components of each token as these are: R = c/N, or, where c is no multiple of
N, c equations for all components, which all tokens carry then (see `mpiquant.collectives.coding`).

Cost: (c+N-2) (alpha + d/c beta), d values in c components: less traffic than a ring, and more
steps.  The result is an approximation, and not the same on all ranks.  Source: the published
descriptions of CERAR.
"""

from __future__ import annotations

from typing import NamedTuple


class Visit(NamedTuple):
    """A token on a rank."""

    token: int
    group: int
    """Components that it carries: they are encoded, and solved for, together."""
    number: int
    """How often this rank has met the group before."""
    received: bool
    """Whether it came from the left; else it starts here."""
    sent: bool
    """Whether it goes on to the right."""


def visits(rank: int, size: int, components: int, groups: int) -> list[Visit]:
    """What a rank does, in order.

    There are as many groups as tokens, each token with its own components, or one, if each token
    carries all of them.
    """
    rounds = components + size - 2
    found = []
    for hop in range(rounds + 1):
        token = (rank - hop) % size
        found.append(Visit(token, token % groups, hop // groups, hop > 0, hop < rounds))
    return found


class Layout(NamedTuple):
    """Where components are in an array.

    All have one length, but for the last ones, behind the end of the array: what lacks there is 0.
    Component m of group k = m mod groups is element m * length + i for i below the group's length.
    """

    elements: int
    components: int
    groups: int
    width: int = 1
    """Elements that make one number of a token: two, if these are complex.  Lengths are multiples
    of it."""

    @property
    def length(self) -> int:
        """Elements of a component."""
        return self.width * -(-self.elements // (self.components * self.width))

    def group_length(self, group: int) -> int:
        """Elements of a group's tokens: those of its first component."""
        present = self.present(group)
        elements: int = present.stop - present.start
        return self.width * -(-elements // self.width)

    def present(self, component: int) -> slice:
        """Elements of a component that there are."""
        begin = min(component * self.length, self.elements)
        return slice(begin, min(begin + self.length, self.elements))
