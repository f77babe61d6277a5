"""The sequence model of co-activation: fitted with torch, evaluated without it (`follow_scorer`).

A user's last visits become one vector: an embedding for each visited model, weighed by place and age. Its match with a candidate's
embedding, and what the tables say of the two, go through one hidden layer to a correction of the table's log-odds of use within 120 s and
within 600 s: a network that learned nothing is the table. Small on purpose: some thousand numbers, seconds on one core. torch is imported
at the first fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher_models.follow_scorer import LOOKS, VISITS, Scorer

__all__ = ["WEIGHTS", "NetSettings", "Samples", "fit_net", "net_scorer"]

Weights = dict[str, npt.NDArray[np.float32]]
#: The arrays that a network is, as in `follow_scorer.Scorer`.
WEIGHTS = ("value", "key", "place", "heed", "first", "first_0", "second", "second_0", "mean", "scale")


@dataclass(frozen=True, slots=True)
class NetSettings:
    """`width` numbers a model, `hidden` units; `epochs` over the samples a fit, the first one `first_epochs`."""

    width: int = 8
    hidden: int = 16
    epochs: int = 2
    first_epochs: int = 4
    batch: int = 2048
    rate: float = 0.004
    decay: float = 0.1


@dataclass(frozen=True, slots=True)
class Samples:
    """What a fit learns from: I instants, S candidates, as in `transitions.Seen`; `base` float[S, 2] the table's log-odds, `used`
    float32[S, 2] whether it came to it (within 120 s, 600 s).
    """

    visits: npt.NDArray[np.int32]
    ages_s: npt.NDArray[np.float32]
    pairs: npt.NDArray[np.int64]
    looks: npt.NDArray[Any]
    base: npt.NDArray[np.float64]
    used: npt.NDArray[np.float32]


def fit_net(
    samples: Samples, n_models: int, weights: Mapping[str, npt.NDArray[np.float32]] | None, seed: int, settings: NetSettings
) -> Weights:
    """Weights after some epochs over `samples`, from `weights` on where there are any. The same input gives the same bytes.

    Raises `ImportError` without torch.
    """
    import torch

    rng = np.random.default_rng(seed)
    start = _grown(weights, n_models, rng) if weights else _first(samples, n_models, rng, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fixed = {name: torch.from_numpy(start[name].copy()) for name in ("mean", "scale")}
        learned = {name: torch.from_numpy(start[name].copy()).requires_grad_() for name in start if name not in fixed}
        tables = [learned[name] for name in ("value", "key")]
        others = [value for name, value in learned.items() if name not in ("value", "key")]
        groups: list[dict[str, Any]] = [{"params": tables, "weight_decay": 5.0 * settings.decay}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=settings.rate, weight_decay=settings.decay)
        looks = (torch.from_numpy(samples.looks.astype(np.float32)) - fixed["mean"]) * fixed["scale"]
        visits = torch.from_numpy(samples.visits.astype(np.int64))
        there = (visits >= 0).float()
        visits = visits.clamp(min=0)
        ages = torch.log1p(torch.from_numpy(samples.ages_s))
        instant = torch.from_numpy(samples.pairs[:, 0].copy())
        model = torch.from_numpy(samples.pairs[:, 1].copy())
        used = torch.from_numpy(samples.used)
        base = torch.from_numpy(samples.base.astype(np.float32))
        epochs = settings.epochs if weights else settings.first_epochs
        steps = max(1, epochs * (len(model) // settings.batch + 1))
        step = 0
        for _ in range(epochs):
            order = rng.permutation(len(model))
            for begin in range(0, len(order), settings.batch):
                rows = torch.from_numpy(order[begin : begin + settings.batch])
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate * (1.0 - 0.9 * step / steps)
                step += 1
                at = instant[rows]
                heed = torch.exp(learned["heed"][:, 0] + learned["heed"][:, 1] * ages[at]) * there[at]
                parts = learned["value"][visits[at]] * learned["place"]
                query = (heed[:, :, None] * parts).sum(1) / (heed.sum(1, keepdim=True) + 1e-9)
                match = (query * learned["key"][model[rows]]).sum(1, keepdim=True)
                hidden = torch.relu(torch.cat([looks[rows], match], 1) @ learned["first"].T + learned["first_0"])
                odds = base[rows] + hidden @ learned["second"].T + learned["second_0"]
                loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, used[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return {**{name: start[name] for name in fixed}, **{name: value.detach().numpy().copy() for name, value in learned.items()}}


def net_scorer(weights: Mapping[str, npt.NDArray[np.float32]], lines: npt.NDArray[np.float64]) -> Scorer:
    """The scorer that these weights make, in force."""
    return Scorer(in_force=np.ones(1, np.int64), lines=lines, **{name: np.ascontiguousarray(weights[name]) for name in WEIGHTS})


def _first(samples: Samples, n_models: int, rng: np.random.Generator, settings: NetSettings) -> Weights:
    looks = samples.looks.astype(np.float32)
    inputs = len(LOOKS) + 1
    made: dict[str, Any] = {
        "value": rng.normal(0.0, 0.3, (n_models, settings.width)),
        "key": rng.normal(0.0, 0.3, (n_models, settings.width)),
        "place": 1.0 + rng.normal(0.0, 0.1, (VISITS, settings.width)),
        "heed": np.stack([-0.3 * np.arange(VISITS), np.full(VISITS, -0.1)], axis=1),
        "first": rng.normal(0.0, 1.0, (settings.hidden, inputs)) / np.sqrt(inputs),
        "first_0": np.zeros(settings.hidden),
        "second": np.zeros((2, settings.hidden)),
        "second_0": np.zeros(2),
        "mean": looks.mean(axis=0),
        "scale": 1.0 / (looks.std(axis=0) + 0.1),
    }
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in made.items()}


def _grown(weights: Mapping[str, npt.NDArray[np.float32]], n_models: int, rng: np.random.Generator) -> Weights:
    out = dict(weights)
    have, width = weights["value"].shape
    if n_models > have:
        for name in ("value", "key"):
            more = rng.normal(0.0, 0.3, (n_models - have, width)).astype(np.float32)
            out[name] = np.concatenate([weights[name], more])
    return out
