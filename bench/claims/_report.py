"""Points, figures, bounds and verdicts of a claims script."""

from __future__ import annotations


class Claims:
    """Prints one line per point; `code` is 1 once a point fell short."""

    def __init__(self) -> None:
        self.code = 0

    def check(self, point: str, figure: float | str, bound: str, holds: bool) -> None:
        shown = figure if isinstance(figure, str) else f"{figure:.4g}"
        verdict = "holds" if holds else "FALLS SHORT"
        print(f"{point:64} {shown:>22} {bound:>14}  {verdict}", flush=True)
        self.code |= not holds

    def at_least(self, point: str, figure: float, bound: float) -> None:
        self.check(point, figure, f">= {bound:g}", figure >= bound)

    def at_most(self, point: str, figure: float, bound: float) -> None:
        self.check(point, figure, f"<= {bound:g}", figure <= bound)
