"""How often a fit's intervals hold what is true, over as many cards of known truth as asked (tests/dry_card.py).

    python benchmarks/dry_card.py 100         some 2 s a card
    python benchmarks/dry_card.py 20 1000     of seeds from 1000 on: the form of the fit was found on seeds 0 to 19
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dry_card import recovered


def main(cards: int, first: int = 0) -> None:
    """A line a coefficient, of seeds from ``first`` on: cards inside the 99 % interval, the median half width,
    root mean square error, bias."""
    found = [recovered(seed) for seed in range(first, first + cards)]
    print(f"{'coefficient':<28}{'inside':>10}{'half width':>12}{'rms error':>11}{'bias':>10}")
    for name in found[0].low:
        own = [r for r in found if name in r.low and name in r.truth]
        if own:
            inside = sum(r.low[name] <= r.truth[name] <= r.high[name] for r in own)
            error = np.array([r.value[name] - r.truth[name] for r in own])
            half = float(np.median([(r.high[name] - r.low[name]) / 2 for r in own]))
            print(f"{name:<28}{f'{inside}/{len(own)}':>10}{half:>12.4f}{np.sqrt(np.mean(error**2)):>11.4f}{error.mean():>+10.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["20"]))
