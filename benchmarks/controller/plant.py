"""How KL answers to its coefficient: a plant model fitted to recorded.json, printed with how well it fits.

python benchmarks/controller/plant.py

Per phase, with K the KL from the reference (nats per token), s its root, c the coefficient, u the learning rate
over 1e-4:

    s <- (s + A u^a) / (1 + B u^b (c0 + m)^p),   log m <- log m + (log c - log m) / tau

A policy that moves at a steady speed moves its K by the square root: the drive A, of reward and of an optimizer whose
steps have one length. What holds it back is the penalty and what is there without one (c0: a reward that has been
got), and a new coefficient is felt after a lag of tau phases. What is left over is noise: a slow part that follows
itself from phase to phase, and a white one from measuring on 32 episodes.

Reward is what part q of it has been learned, r = r0 + (r1 - r0) q, with

    q <- (q + G u^a) / (1 + G u^a + H u^b m)

Fitted by Levenberg-Marquardt on the logs of whole simulated runs, not on single steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded.json"
PLANT = Path(__file__).parent / "plant.json"
NAMES = ("log A", "a", "log B", "b", "log c0", "p", "log tau")
START = (math.log(0.02), 1.0, math.log(0.15), 1.0, math.log(0.5), 1.0, math.log(4.0))
REWARD_NAMES = ("log G", "a", "log H", "b", "r0", "r1")
REWARD_START = (math.log(0.03), 0.5, math.log(0.02), 0.5, 0.5, 0.9)
PRIOR = 0.05  # weight of staying near START, so that what the runs do not tell stays sensible
SMALLEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class Plant:
    """theta as in NAMES, reward as in REWARD_NAMES. Noise of log KL: deviation of the slow part, how much of it
    stays from one phase to the next, deviation of the white part."""

    theta: tuple[float, ...]
    reward: tuple[float, ...] = REWARD_START
    slow: float = 0.0
    memory: float = 0.0
    white: float = 0.0

    def step(self, kl: float, felt: float, coef: float, lr: float) -> tuple[float, float]:
        """KL at the start of the next phase, and the coefficient felt there."""
        log_a, a, log_b, b, log_c0, p, log_tau = self.theta
        log_u = math.log(lr / 1e-4)
        felt *= (coef / felt) ** min(1.0, math.exp(-log_tau))
        pull = math.exp(log_b + b * log_u) * (math.exp(log_c0) + felt) ** p
        root = (math.sqrt(kl) + math.exp(log_a + a * log_u)) / (1 + pull)
        return max(root * root, SMALLEST), felt

    def learn(self, learned: float, felt: float, lr: float) -> float:
        """The part of the reward learned a phase later."""
        log_g, a, log_h, b, *_ = self.reward
        log_u = math.log(lr / 1e-4)
        gain = math.exp(log_g + a * log_u)
        return (learned + gain) / (1 + gain + math.exp(log_h + b * log_u) * felt)


def simulate(plant: Plant, coefs: Sequence[float], lr: float) -> list[float]:
    """KL at the start of each phase without noise; the first one sees the reference itself."""
    out, felt = [SMALLEST], coefs[0]
    for coef in coefs[:-1]:
        kl, felt = plant.step(out[-1], felt, coef, lr)
        out.append(kl)
    return out


def residuals(theta: Sequence[float], runs: list[dict[str, Any]]) -> list[np.ndarray]:
    """log observed - log simulated KL of each run, from the third phase on."""
    plant = Plant(theta=tuple(theta))
    return [
        np.log(np.maximum(run["kl"][2:], SMALLEST)) - np.log(simulate(plant, run["coef"], run["lr"])[2:])
        for run in runs
    ]


def reward_residuals(reward: Sequence[float], plant: Plant, runs: list[dict[str, Any]]) -> list[np.ndarray]:
    """Observed - simulated mean reward of each run."""
    plant, (low, high), out = replace(plant, reward=tuple(reward)), reward[4:], list[np.ndarray]()
    for run in runs:
        kl, felt, learned, simulated = SMALLEST, run["coef"][0], 0.0, list[float]()
        for coef in run["coef"]:
            simulated.append(low + (high - low) * learned)
            kl, felt = plant.step(kl, felt, coef, run["lr"])
            learned = plant.learn(learned, felt, run["lr"])
        out.append(np.array(run["reward"]) - simulated)
    return out


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
        return np.concatenate([*residuals(theta, runs), PRIOR * math.sqrt(150) * (theta - start)])

    theta = least_squares(function, START)
    slow, memory, white = noise_of(residuals(theta, runs))
    plant = Plant(theta=tuple(float(v) for v in theta), slow=slow, memory=memory, white=white)
    start_reward = np.array(REWARD_START)

    def of_reward(reward: np.ndarray) -> np.ndarray:
        prior = PRIOR * (reward - start_reward)
        return np.concatenate([*reward_residuals(tuple(reward), plant, runs), prior])

    reward = least_squares(of_reward, REWARD_START)
    return replace(plant, reward=tuple(float(v) for v in reward))


def load() -> Plant:
    """The fitted plant, as written by main."""
    record = json.loads(PLANT.read_text())
    return Plant(**{**record, "theta": tuple(record["theta"]), "reward": tuple(record["reward"])})


def main() -> None:
    runs: list[dict[str, Any]] = json.loads(RECORDED.read_text())
    plant = fit(runs)
    PLANT.write_text(json.dumps(asdict(plant)) + "\n")
    print(", ".join(f"{name} {value:.3f}" for name, value in zip(NAMES, plant.theta, strict=True)))
    print(", ".join(f"{name} {value:.3f}" for name, value in zip(REWARD_NAMES, plant.reward, strict=True)))
    print(f"noise in log KL: slow {plant.slow:.2f} (memory {plant.memory:.2f}), white {plant.white:.2f}")
    errors = residuals(plant.theta, runs)
    for run, error in zip(runs, errors, strict=True):
        print(f"{run['name']:>20}: rms error of log KL {np.sqrt(np.mean(error**2)):.2f}, mean {np.mean(error):+.2f}")
    for run, error in zip(runs, reward_residuals(plant.reward, plant, runs), strict=True):
        print(f"{run['name']:>20}: rms error of reward {np.sqrt(np.mean(error**2)):.3f}, mean {np.mean(error):+.3f}")
    logs = np.concatenate([np.log(np.maximum(run["kl"][2:], SMALLEST)) for run in runs])
    print(f"explained variance of log KL: {1 - np.var(np.concatenate(errors)) / np.var(logs):.2f}")
    without = [fit([r for r in runs if r is not run]) for run in runs if run["name"].startswith("stairs")]
    stairs = [run for run in runs if run["name"].startswith("stairs")]
    for run, other in zip(stairs, without, strict=True):
        error = residuals(other.theta, [run])[0]
        print(f"{run['name']:>20}: rms error {np.sqrt(np.mean(error**2)):.2f} when fitted on the other runs only")
    for lr in (3e-5, 6e-5, 1e-4, 2e-4, 3e-4):
        rest = [simulate(plant, [coef] * 400, lr)[-1] for coef in (0.001, 0.02, 0.2, 1.0, 5.0)]
        print(f"rests at lr {lr:g}, coefficient 0.001 0.02 0.2 1 5: " + " ".join(f"{kl:.4f}" for kl in rest))


if __name__ == "__main__":
    main()
