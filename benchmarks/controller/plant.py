"""How KL answers to its coefficient: a plant model fitted to recorded.json, printed with how well it fits.

python benchmarks/controller/plant.py

Per phase, with K the KL from the reference (nats per token), s its root, c the coefficient, u the learning rate
over 1e-4, q the part of the reward learned:

    s <- (s + A u^a (f + (1 - f) (1 - q))) / (1 + B u^b (c0 + m)^p),   log m <- log m + (log c - log m) / tau
    q <- (q + G u^g) / (1 + G u^g + H u^h m),                          reward = r0 + (r1 - r0) q

A policy that moves at a steady speed moves its K by the square root: the drive A, of reward still to be got and, the
part f, of an optimizer that goes on stepping. What holds it back is the penalty and what is there without one (c0),
and a new coefficient is felt after a lag of tau phases. What is left over is noise: a slow part that follows itself
from phase to phase, and a white one from measuring on 32 episodes.
Fitted by Levenberg-Marquardt on the logs of whole simulated runs, not on single steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded.json"
PLANT = Path(__file__).parent / "plant.json"
NAMES = ("log A", "a", "log B", "b", "log c0", "p", "log tau", "logit f", "log G", "g", "log H", "h", "r0", "r1")
START = (math.log(0.02), 1.0, math.log(0.15), 1.0, math.log(0.5), 1.0, math.log(4.0), 0.0)
START += (math.log(0.03), 0.5, math.log(0.02), 0.5, 0.5, 0.9)
PRIOR = 0.05  # weight of staying near START, so that what the runs do not tell stays sensible
SMALLEST = 1e-5
KL_SPREAD, REWARD_SPREAD = 0.4, 0.07


@dataclass(frozen=True, kw_only=True)
class Plant:
    """theta as in NAMES. Noise of log KL: deviation of the slow part, how much of it
    stays from one phase to the next, deviation of the white part."""

    theta: tuple[float, ...]
    slow: float = 0.0
    memory: float = 0.0
    white: float = 0.0

    def step(self, kl: float, felt: float, learned: float, coef: float, lr: float) -> tuple[float, float, float]:
        """KL at the start of the next phase, the coefficient felt there, and the part of the reward learned."""
        log_a, a, log_b, b, log_c0, p, log_tau, logit_f, log_g, g, log_h, h, *_ = self.theta
        log_u, f = math.log(lr / 1e-4), 1 / (1 + math.exp(-logit_f))
        drive = math.exp(log_a + a * log_u) * (f + (1 - f) * (1 - learned))
        felt *= (coef / felt) ** min(1.0, math.exp(-log_tau))
        pull = math.exp(log_b + b * log_u) * (math.exp(log_c0) + felt) ** p
        root = (math.sqrt(kl) + drive) / (1 + pull)
        gain = math.exp(log_g + g * log_u)
        learned = (learned + gain) / (1 + gain + math.exp(log_h + h * log_u) * felt)
        return max(root * root, SMALLEST), felt, learned


def simulate(plant: Plant, coefs: Sequence[float], lr: float) -> tuple[np.ndarray, np.ndarray]:
    """KL at the start of each phase and its reward, without noise; the first one sees the reference itself."""
    kl, felt, learned = SMALLEST, coefs[0], 0.0
    kls, rewards = list[float](), list[float]()
    for coef in coefs:
        kls.append(kl)
        rewards.append(plant.theta[-2] + (plant.theta[-1] - plant.theta[-2]) * learned)
        kl, felt, learned = plant.step(kl, felt, learned, coef, lr)
    return np.array(kls), np.array(rewards)


def residuals(theta: Sequence[float], runs: list[dict[str, Any]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each run: log observed - log simulated KL from the third phase on, and observed - simulated reward."""
    plant, logs, rewards = Plant(theta=tuple(theta)), list[np.ndarray](), list[np.ndarray]()
    for run in runs:
        kl, reward = simulate(plant, run["coef"], run["lr"])
        logs.append(np.log(np.maximum(run["kl"][2:], SMALLEST)) - np.log(kl[2:]))
        rewards.append(np.array(run["reward"]) - reward)
    return logs, rewards


def least_squares(function: Callable[[np.ndarray], np.ndarray], start: Sequence[float], turns: int = 60) -> np.ndarray:
    """Levenberg-Marquardt with forward differences."""
    x, damping = np.array(start, dtype=float), 1e-2
    value = function(x)
    for _ in range(turns):
        jacobian = np.stack([(function(x + 1e-5 * e) - value) / 1e-5 for e in np.eye(len(x))], axis=1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ value)
        tried = function(x + step)
        if tried @ tried < value @ value:
            x, value, damping = x + step, tried, damping / 3
        else:
            damping *= 4
    return x


def noise_of(errors: list[np.ndarray]) -> tuple[float, float, float]:
    """Slow deviation, its memory, white deviation, from the autocovariances at lags 0, 1 and 4."""
    lag = {k: float(np.mean([np.mean(e[k:] * e[: len(e) - k]) for e in errors])) for k in (0, 1, 4)}
    memory = min(max((max(lag[4], 1e-9) / max(lag[1], 1e-9)) ** (1 / 3), 0.3), 0.97)
    slow = min(max(lag[1], 0.0) / memory, lag[0])
    return math.sqrt(slow), memory, math.sqrt(lag[0] - slow)


def fit(runs: list[dict[str, Any]]) -> Plant:
    start = np.array(START)

    def function(theta: np.ndarray) -> np.ndarray:
        logs, rewards = residuals(tuple(theta), runs)
        spread = [log / KL_SPREAD for log in logs] + [reward / REWARD_SPREAD for reward in rewards]
        return np.concatenate([*spread, math.sqrt(150) * PRIOR / KL_SPREAD * (theta - start)])

    theta = least_squares(function, START)
    slow, memory, white = noise_of(residuals(theta, runs)[0])
    return Plant(theta=tuple(float(v) for v in theta), slow=slow, memory=memory, white=white)


def load() -> Plant:
    """The fitted plant, as written by main."""
    record = json.loads(PLANT.read_text())
    return Plant(**{**record, "theta": tuple(record["theta"])})


def main() -> None:
    runs: list[dict[str, Any]] = json.loads(RECORDED.read_text())
    plant = fit(runs)
    PLANT.write_text(json.dumps(asdict(plant)) + "\n")
    print(", ".join(f"{name} {value:.3f}" for name, value in zip(NAMES, plant.theta, strict=True)))
    print(f"noise in log KL: slow {plant.slow:.2f} (memory {plant.memory:.2f}), white {plant.white:.2f}")
    errors, rewards = residuals(plant.theta, runs)
    for run, error, reward in zip(runs, errors, rewards, strict=True):
        text = f"log KL off by {np.sqrt(np.mean(error**2)):.2f} (rms), mean {np.mean(error):+.2f}"
        print(f"{run['name']:>20}: {text}; reward by {np.sqrt(np.mean(reward**2)):.3f}, mean {np.mean(reward):+.3f}")
    logs = np.concatenate([np.log(np.maximum(run["kl"][2:], SMALLEST)) for run in runs])
    print(f"explained variance of log KL: {1 - np.var(np.concatenate(errors)) / np.var(logs):.2f}")
    for run in runs:
        if run["name"].startswith("stairs"):
            error = residuals(fit([other for other in runs if other is not run]).theta, [run])[0][0]
            print(f"{run['name']:>20}: log KL off by {np.sqrt(np.mean(error**2)):.2f} when fitted on the other runs")
    for lr in (3e-5, 6e-5, 1e-4, 2e-4, 3e-4):
        rest = [simulate(plant, [coef] * 400, lr)[0][-1] for coef in (0.001, 0.02, 0.2, 1.0, 5.0)]
        print(f"rests at lr {lr:g}, coefficient 0.001 0.02 0.2 1 5: " + " ".join(f"{kl:.4f}" for kl in rest))


if __name__ == "__main__":
    main()
