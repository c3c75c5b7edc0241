"""Where the prices of a plan come from: modelled, or timed where it will run."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.plan.plan_collectives import collectives_of
from autoshard.plan.plan_content import PlanContent
from cost_model.timed import Priced

__all__ = ["priced_words", "refined_line"]

Price = tuple[float, Priced]
"""Seconds, and where they come from."""

_WORDS: dict[Priced, str] = {"timed": "timed", "near": "near a timed one", "modelled": "modelled"}


def refined_line(*plans: PlanContent) -> str:
    """Of all seconds that the search adds up, in the plan, or in those of all stages of one."""
    if not any(plan.origin.timed for plan in plans):
        return "unrefined: every price is modelled"
    records = [record for plan in plans for record in plan.records]
    prices: list[Price] = [(record.seconds, record.priced) for record in records]
    prices.extend((one.seconds, one.priced) for plan in plans for one in collectives_of(plan.records))
    return f"refined on these devices: {_shares(prices)}"


def priced_words(prices: Iterable[Price]) -> str:
    """ "timed", or, of several that differ, by shares of their seconds; "" of what takes no time."""
    found = [price for price in prices if price[0] > 0.0]
    kinds = {_WORDS[priced] for _, priced in found}
    return _shares(found) if len(kinds) > 1 else "".join(kinds)


def _shares(prices: Iterable[Price]) -> str:
    found = list(prices)
    whole = sum(seconds for seconds, _ in found) or 1.0
    shares = {word: sum(s for s, priced in found if priced == kind) / whole for kind, word in _WORDS.items()}
    return ", ".join(f"{share:.0%} {word}" for word, share in shares.items() if share)
