"""The mathematics of the coded ring (CERAR): nodes, weights, decoding, errors.  No MPI.

*Setting.*  Each of N ranks cuts its array into c components.  N tokens of one component's length
walk around the ring, token k from rank k on; after h hops it is on rank k + h.  A rank that holds a
token replaces its own earlier contribution, a weighted sum of components, by a newly weighted one.
From hop N-1 on all ranks are in every token, so each token that comes is one linear equation for
the total; after c of them, in round c+N-2, the rank solves.  That takes c+N-2 messages of 1/c of
the array: 1 + (N-2)/c times the array, where a ring takes 2(N-1)/N times.

*Error.*  The ranks that a token has met in its present lap stand at one weight, the others at that
of the lap before.  The nodes x are chosen close to 1 (or to a root of unity), so that this hardly
matters: the error is proportional to their spread eps.  The closer they are, the worse is the
system's condition, as eps to the power of -(ceil(c/N)-1), and with it the rounding error.  `design`
finds the eps at which both together are least.

*Constructions.*

`perturbed` (c = R N): token k carries the R components k, k+N, k+2N, ...; on the p-th visit, a
contribution to it is the sum of x_q^p times component k+qN, with nodes x_q = 1 + eps z_q.  Systems
of R equations, with real numbers, and a hop is one addition: the one to use.  For R = 1 it is the
ring.

`roots_of_unity` (any c >= N): every token carries all components, as complex numbers, two real ones
in each; node m is w^(m mod N) exp(i eps z_m), w an N-th root of unity, and the weight at hop h of
token k its power N floor(h/N) + (-k mod N).  Systems of c equations: encoding and decoding take
c+N-1 and c multiplications for each value.

`vandermonde`: every token carries all components, node m to the power of the hop.  Its condition
grows as eps^-(c-1): for study, with few components.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mpiquant.typing import Array

ROUNDING = 0.2
"""Root mean square of a rounding error, over the spacing of numbers at 1 times the value: for a
value anywhere between two powers of two, and an error anywhere within half a spacing."""


@dataclass(frozen=True)
class Code:
    """Weights of a coded ring; a subclass says which.

    Parameters
    ----------
    size : int
        Ranks N, two or more.
    components : int
        Components c of the array, N or more.
    eps : float
        Spread of the nodes.

    Notes
    -----
    Errors are relative 2-norm errors on the worst rank, expected for arrays of independent normal
    numbers.  The functions that solve systems of all c equations take N^2 c^3 operations.
    """

    size: int
    components: int
    eps: float

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a ring has two ranks or more, not {self.size}")
        if self.components < self.size:
            raise ValueError(
                f"{self.components} components for {self.size} ranks: as many or more are needed"
            )
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps is {self.eps}, expected 0 <= eps < 1")

    # ---- cost ----

    @property
    def rounds(self) -> int:
        """Messages that each rank sends, one after the other."""
        return self.components + self.size - 2

    @property
    def rate(self) -> float:
        """What each rank sends, times the array."""
        return self.rounds / self.components

    @property
    def storage(self) -> float:
        """Memory of each rank, times the array."""
        return 1 + self.size / self.components

    @property
    def order(self) -> int:
        """The condition number grows as 1/eps to this power."""
        return -(-self.components // self.size) - 1

    # ---- what a rank computes ----

    @property
    def groups(self) -> int:
        """Sets of components that are encoded together: N, or one where a token carries all.

        Component m is in group m modulo these, and token k carries group k modulo these.
        """
        return 1

    @property
    def width(self) -> int:
        """Real numbers in one of a token."""
        return 2 if np.iscomplexobj(self.nodes) else 1

    def encoding(self, distance: int) -> Array:
        """(visits, m) array: the m components of a group to what is added on each visit.

        For a rank at a distance behind the start of the group's first token.
        """
        rows = []
        for hop in range(self.rounds + 1):
            token = (distance - hop) % self.size
            row = self.row(token, hop)
            rows.append(row if hop < self.size else row - self.row(token, hop - self.size))
        return np.array(rows)

    def decoding(self, distance: int) -> Array:
        """(m, m) array: the equations of a group, in the order of the visits, to its components.

        They are those of the last m visits.
        """
        return np.asarray(np.linalg.inv(self.system(distance)))

    # ---- weights ----

    @property
    def nodes(self) -> Array:
        """(c,) array: x_m."""
        raise NotImplementedError

    def exponent(self, token: int, hop: int) -> int:
        """Power of the nodes with which a rank contributes to a token at a hop."""
        raise NotImplementedError

    def carries(self, token: int) -> Array:
        """(c,) array of bool: which components a token carries."""
        return np.ones(self.components, bool)

    def row(self, token: int, hop: int) -> Array:
        """(c,) array: weights of a rank's components in a token, from this hop on for a lap."""
        return np.where(self.carries(token), self.nodes ** self.exponent(token, hop), 0)

    def hops(self) -> range:
        """Hops after which a token is an equation."""
        return range(self.size - 1, self.rounds + 1)

    def system(self, rank: int, source: int | None = None) -> Array:
        """(c, c) array: how the components of a source enter the equations of a rank.

        A row for each hop from N-1 on.  The source is the rank itself by default; these weights
        are what it solves with.
        """
        behind = 0 if source is None else (rank - source) % self.size
        rows = [self.row((rank - hop) % self.size, hop - behind) for hop in self.hops()]
        return np.array(rows)

    def effect(self, rank: int, source: int) -> Array:
        """(c, c) array: what a rank's solution has of a source's components; I if it were exact."""
        return np.linalg.solve(self.system(rank), self.system(rank, source))

    # ---- errors ----

    @property
    def _unlike_ranks(self) -> range:
        """Ranks whose errors may differ."""
        return range(self.size)

    @cached_property
    def condition(self) -> float:
        """Condition number of the systems, in the 2-norm; the largest of all ranks."""
        return max(float(np.linalg.cond(self.system(rank))) for rank in range(self.size))

    @cached_property
    def bias(self) -> float:
        """Error in exact arithmetic."""
        one = np.eye(self.components)
        errors = [
            sum(np.linalg.norm(self.effect(rank, source) - one) ** 2 for source in range(self.size))
            for rank in range(self.size)
        ]
        return math.sqrt(max(errors) / (self.size * self.components))

    def rounding(self, dtype: DTypeLike) -> float:
        """Error of rounding to a dtype with each hop."""
        spacing = float(np.finfo(dtype).eps)
        return max(self._rounding_of(rank) for rank in self._unlike_ranks) * ROUNDING * spacing

    def _rounding_of(self, rank: int) -> float:
        inverse = np.linalg.inv(self.system(rank))
        hops = list(self.hops())
        tokens = [(rank - hop) % self.size for hop in hops]
        noise = np.zeros((len(hops), len(hops)))
        for a, first in enumerate(hops):
            for b, second in enumerate(hops):
                if tokens[a] == tokens[b]:  # one has the errors of the other, and some of its own
                    noise[a, b] = self._noise(tokens[a], min(first, second))
        total = np.trace(inverse @ noise @ inverse.conj().T).real
        return math.sqrt(total / (self.size * self.components))

    def _noise(self, token: int, hop: ArrayLike) -> Any:
        """Variance of a token's rounding errors, for components of variance 1 and spacing 1.

        Each hop rounds a sum of so many ranks' contributions as it has met.
        """
        hop = np.asarray(hop)
        growing = np.minimum(hop + 1, self.size)
        sums = growing * (growing + 1) / 2 + (hop + 1 - growing) * self.size
        return int(self.carries(token).sum()) * sums

    def error(self, dtype: DTypeLike) -> float:
        """Bias and rounding together."""
        return math.hypot(self.bias, self.rounding(dtype))


@dataclass(frozen=True)
class Perturbed(Code):
    """R components to a token, R = c/N, in systems of R equations.

    Parameters
    ----------
    balanced : bool
        Scale contributions and solutions, so that the weights of each source have mean 1 over all
        receivers, and those of each receiver over all sources: equal arrays then have no error,
        and others one that is up to 2.4 times smaller.  Otherwise the own contribution is exact.
    flipped : bool
        Give each component the node on the other side of 1.  In the sum of two calls, one of them
        flipped, what stays alike in the arrays has an error of eps^2 only.

    Notes
    -----
    All depends on the distance d of a rank behind the start of a token, and is the same for all
    ranks.
    """

    balanced: bool = False
    flipped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components % self.size:
            raise ValueError(
                f"{self.components} components are no multiple of {self.size} ranks: "
                "use roots_of_unity"
            )

    @property
    def per_token(self) -> int:
        """R."""
        return self.components // self.size

    @cached_property
    def spread(self) -> Array:
        """(R,) array: z_q, evenly in [-1, 1]; 0 alone."""
        n, end = self.per_token, -1.0 if self.flipped else 1.0
        return np.linspace(-end, end, n) if n > 1 else np.zeros(1)

    @cached_property
    def token_nodes(self) -> Array:
        """(R,) array: x_q = 1 + eps z_q."""
        return 1.0 + self.eps * self.spread

    @property
    def nodes(self) -> Array:
        return np.repeat(self.token_nodes, self.size)

    def exponent(self, token: int, hop: int) -> int:
        return hop // self.size

    def carries(self, token: int) -> Array:
        return np.asarray(np.arange(self.components) % self.size == token)

    # ---- what a rank computes ----

    @property
    def groups(self) -> int:
        return self.size

    def encoding(self, distance: int) -> Array:
        """(R+1, R) array; (R, R) at the greatest distance, N-1, where R visits are enough."""
        x, n = self.token_nodes, self.per_token
        visits = n + (distance < self.size - 1)
        rows = [np.ones(n)] + [x ** (p - 1) * (self.eps * self.spread) for p in range(1, visits)]
        return np.array(rows) * self.scales[0][:, distance]

    def decoding(self, distance: int) -> Array:
        """(R, R) array.

        The first equation is that of the second visit; at distance N-1 that of the first one.
        """
        scales = self.scales[1][:, distance]
        if distance < self.size - 1:
            scales = scales / self.token_nodes
        return np.asarray(self._inverse * scales[:, None])

    @cached_property
    def _inverse(self) -> Array:
        """(R, R) array: equations from the first visit on to components, without scales.

        Row q are the coefficients of the Lagrange polynomial of node q.  Nothing is lost in them:
        the nodes are positive, and their differences known exactly.
        """
        x, z, n = self.token_nodes, self.spread, self.per_token
        rows = np.ones((n, n))
        for q in range(n if n > 1 else 0):
            others = np.poly(np.delete(x, q))[::-1]
            rows[q] = others / np.prod(self.eps * (z[q] - np.delete(z, q)))
        return rows

    @cached_property
    def scales(self) -> tuple[Array, Array]:
        """(R, N) arrays: of contributions, and of solutions, by component and distance."""
        ones = np.ones((self.per_token, self.size))
        if not self.balanced or self.per_token == 1:
            return ones, ones
        sources, receivers = ones.copy(), ones.copy()
        for q, x in enumerate(self.token_nodes):
            weights = self._weights(x)
            for _ in range(100):  # Sinkhorn's iteration; a few rounds unless eps is large
                sources[q] = 1 / (receivers[q] @ weights * (1 / self.size))
                new = 1 / (weights @ sources[q] * (1 / self.size))
                done = np.abs(new - receivers[q]).max() < 1e-13
                receivers[q] = new
                if done:
                    break
        return sources, receivers

    def _weights(self, x: float) -> Array:
        """(N, N) array: weight at a receiver's distance of a source at its distance."""
        distances = np.arange(self.size)
        met = distances[None, :] <= distances[:, None]
        return np.where(met, 1.0, 1.0 / x)

    def weights(self, q: int) -> Array:
        """(N, N) array: the same of a token's component q, with the scales."""
        sources, receivers = self.scales
        weights = self._weights(self.token_nodes[q])
        return np.asarray(receivers[q][:, None] * weights * sources[q])

    # ---- errors ----

    @property
    def _unlike_ranks(self) -> range:
        return range(1)

    @cached_property
    def condition(self) -> float:
        powers = np.arange(self.per_token)[:, None]
        x = self.token_nodes
        systems = (x**powers, x ** (powers + 1))
        return max(float(np.linalg.cond(system)) for system in systems)

    @cached_property
    def bias(self) -> float:
        away = [np.sum((self.weights(q) - 1) ** 2) for q in range(self.per_token)]
        return math.sqrt(float(np.mean(away)) / self.size**2)

    def _rounding_of(self, rank: int) -> float:
        total = 0.0
        for distance in range(self.size):
            inverse = self.decoding(distance)
            visits = np.arange(self.per_token) + (distance < self.size - 1)
            hops = np.minimum.outer(visits, visits) * self.size + distance
            total += float(np.trace(inverse @ self._noise(0, hops) @ inverse.T))
        return math.sqrt(total / (self.size * self.components))


@dataclass(frozen=True)
class RootsOfUnity(Code):
    """All components in each token, as complex numbers.

    Parameters
    ----------
    flipped : bool
        Turn each node to the other side of its root, as in `Perturbed`.
    """

    flipped: bool = False

    @cached_property
    def nodes(self) -> Array:
        n = np.arange(self.components)
        shares = -(-(self.components - n % self.size) // self.size)  # how many have this root
        z = np.where(shares > 1, 2.0 * (n // self.size) / np.maximum(shares - 1, 1) - 1.0, 0.0)
        turn = -self.eps if self.flipped else self.eps
        return np.asarray(np.exp(1j * (2 * np.pi * (n % self.size) / self.size + turn * z)))

    def exponent(self, token: int, hop: int) -> int:
        return self.size * (hop // self.size) + (-token) % self.size


@dataclass(frozen=True)
class Vandermonde(Code):
    """All components in each token, with powers of real nodes."""

    @cached_property
    def nodes(self) -> Array:
        return 1.0 + self.eps * np.linspace(-1.0, 1.0, self.components)

    def exponent(self, token: int, hop: int) -> int:
        return hop

    @property
    def order(self) -> int:
        return self.components - 1


CONSTRUCTIONS: dict[str, Callable[[int, int, float], Code]] = {
    "perturbed": Perturbed,
    "roots_of_unity": RootsOfUnity,
    "vandermonde": Vandermonde,
}


# ---- design ----


@dataclass(frozen=True)
class Design:
    """A code for a purpose, and what to expect of it.

    Attributes
    ----------
    code : Code
    error, bias, rounding : float
        Relative 2-norm errors on normal data: in all, in exact arithmetic, and of the dtype.
    condition : float
    """

    code: Code
    error: float
    bias: float
    rounding: float
    condition: float


def design(
    size: int,
    components: int | None = None,
    dtype: DTypeLike = np.float32,
    *,
    cond_max: float | None = None,
    error_max: float | None = None,
    balanced: bool = True,
) -> Design:
    """The code with the least error, or with the least traffic that keeps to an error.

    Parameters
    ----------
    size : int
        Ranks.
    components : int, optional
        c, N or more.  A multiple of N makes a `Perturbed` code, any other one `RootsOfUnity`.
        By default twice as many as ranks; with `error_max` as many as that allows; for two ranks
        two, since they exchange their arrays anyway.
    dtype : dtype
        float32 or float64.
    cond_max : float, optional
        Largest condition number.
    error_max : float, optional
        Largest relative error.
    balanced : bool
        See `Perturbed`.

    Raises
    ------
    ValueError
        If no code of so many components keeps to the limits.
    """
    if components is None and size == 2:
        components = size  # nothing sends less
    if components is None and error_max is not None:
        return _fewest_bytes(size, dtype, cond_max, error_max, balanced)
    c = 2 * size if components is None else components

    def make(eps: float) -> Code:
        if c % size == 0:
            return Perturbed(size, c, eps, balanced)
        return RootsOfUnity(size, c, eps)

    found = _least_error(make, dtype, cond_max)
    if error_max is not None and found.error > error_max:
        raise ValueError(
            f"{c} components for {size} ranks in {np.dtype(dtype)} have an error of "
            f"{found.error:.2g} at best, more than {error_max:.2g}"
        )
    return found


MOST_PER_TOKEN = 8

LARGEST_CONDITION = 1e12
"""About where the search for eps begins: float64 could not solve much worse systems."""


def _fewest_bytes(
    size: int, dtype: DTypeLike, cond_max: float | None, error_max: float, balanced: bool
) -> Design:
    """As many components to a token as the error allows; one of them is exact."""
    found = design(size, size, dtype, balanced=balanced)
    for per_token in range(2, MOST_PER_TOKEN + 1):
        c = per_token * size
        more = design(size, c, dtype, cond_max=cond_max, balanced=balanced)
        if more.error > error_max:
            break
        found = more
    return found


def _least_error(make: Callable[[float], Code], dtype: DTypeLike, cond_max: float | None) -> Design:
    """Best eps: the bias rises with it, and the rounding error and the condition fall."""
    first = make(0.5)
    if first.order == 0:
        return _described(make(0.0), dtype)
    least = 0.0 if cond_max is None else _eps_of_condition(make, cond_max)
    lowest = LARGEST_CONDITION ** (-1 / first.order)
    count = round(math.log2(0.5 / lowest)) + 1
    grid = [eps for eps in np.geomspace(lowest, 0.5, count) if eps > least]
    errors = [make(eps).error(dtype) for eps in grid]
    if not grid:
        return _described(make(least), dtype)
    best = int(np.argmin(errors))
    low = max(least, grid[best - 1] if best else grid[0] / 2)
    high = grid[min(best + 1, len(grid) - 1)]
    for _ in range(20):  # by thirds, of a function with one valley
        a, b = low * (high / low) ** (1 / 3), low * (high / low) ** (2 / 3)
        if make(a).error(dtype) < make(b).error(dtype):
            high = b
        else:
            low = a
    return _described(make(math.sqrt(low * high)), dtype)


def _eps_of_condition(make: Callable[[float], Code], cond_max: float) -> float:
    """The least eps that has at most this condition number."""
    low, high = 1e-12, 0.5
    if make(high).condition > cond_max:
        raise ValueError(
            f"a condition number of at most {cond_max:.3g} needs fewer components: the least "
            f"one is {make(high).condition:.3g}"
        )
    for _ in range(60):
        middle = math.sqrt(low * high)
        if make(middle).condition > cond_max:
            low = middle
        else:
            high = middle
    return high


def _described(code: Code, dtype: DTypeLike) -> Design:
    rounding = code.rounding(dtype)
    return Design(code, math.hypot(code.bias, rounding), code.bias, rounding, code.condition)
