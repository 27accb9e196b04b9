"""What the report draws: panels, their axes and lines, as data that the page and the picture share."""

from __future__ import annotations

from dataclasses import dataclass

COLORS = ("#1f6fb4", "#cc5a0c", "#0b8565", "#9b3f86", "#a87c00", "#667080")
"""Blue, vermilion, green, purple, ochre, grey: told apart by people with any of the usual colour blindnesses."""
GIB = 1 / 2**30


@dataclass(frozen=True, kw_only=True)
class Line:
    """axis: which of the panel's axes; faint: thin and light, in the background of the others."""

    key: str
    name: str
    color: int
    axis: int = 0
    scale: float = 1.0
    markers: bool = False
    dash: str = "solid"
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """unit: said above the axis; form: d3 format of its ticks and of the values under the cursor; zero: from 0 up;
    share: at least from 0 to this, whatever the values are; log: powers of ten."""

    unit: str
    form: str = ".4~g"
    zero: bool = False
    share: float | None = None
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """band: the target of the KL goes behind the first axis. stack: all `time/*` but the whole, stacked."""

    id: str
    title: str
    about: str
    axes: tuple[Axis, ...]
    lines: tuple[Line, ...] = ()
    band: bool = False
    stack: bool = False


PANELS = (
    Panel(
        id="reward",
        title="Reward",
        about="Training reward that rises while held-out stays flat is reward hacking.",
        axes=(Axis(unit="reward, share correct"),),
        lines=(
            Line(key="reward/mean", name="training reward", color=0),
            Line(key="eval/reward", name="held-out reward", color=1, markers=True),
            Line(key="eval/accuracy", name="held-out accuracy", color=2, markers=True, dash="dash"),
            Line(key="eval/pass_at_k", name="held-out pass@k", color=3, markers=True, dash="dot"),
        ),
    ),
    Panel(
        id="kl",
        title="KL to the reference",
        about="Nats per token and the coefficient that steers it.",
        axes=(Axis(unit="nats per token", form=".3~g", zero=True), Axis(unit="coefficient", form=".3~g", zero=True)),
        lines=(
            Line(key="kl/k3", name="k3", color=0),
            Line(key="kl/k1", name="k1", color=4, faint=True),
            Line(key="kl/coef", name="coefficient", color=3, axis=1),
        ),
        band=True,
    ),
    Panel(
        id="ratio",
        title="Ratio and clipping",
        about="How far one phase moves the policy, and the share of tokens that the clip stops.",
        axes=(
            Axis(unit="distance of the ratio from 1", form=".1~e", log=True),
            Axis(unit="clipped", form=".2~%", share=0.01),
        ),
        lines=(
            Line(key="policy/ratio_abs_dev_max", name="largest", color=4, faint=True),
            Line(key="policy/ratio_abs_dev", name="mean", color=0),
            Line(key="policy/clip_fraction_high", name="clipped above", color=1, axis=1),
            Line(key="policy/clip_fraction_low", name="clipped below", color=2, axis=1),
        ),
    ),
    Panel(
        id="entropy",
        title="Entropy",
        about="A fall to zero means the policy no longer explores; a climb means it is coming apart.",
        axes=(Axis(unit="nats per token", form=".3~g", zero=True),),
        lines=(Line(key="policy/entropy", name="entropy", color=0),),
    ),
    Panel(
        id="length",
        title="Length of responses",
        about="Truncated ones never reached their end.",
        axes=(Axis(unit="tokens", zero=True), Axis(unit="truncated", form=".2~%", share=0.02)),
        lines=(
            Line(key="length/max", name="longest", color=4, faint=True),
            Line(key="length/mean", name="mean", color=0),
            Line(key="eval/length", name="held-out mean", color=1, markers=True),
            Line(key="length/truncated", name="truncated", color=3, axis=1),
        ),
    ),
    Panel(
        id="value",
        title="Value fit",
        about="Explained variance near 1 is a critic that knows what is coming; below 0 it is worse than a constant.",
        axes=(Axis(unit="explained variance", form=".3~g"), Axis(unit="loss", form=".3~g", zero=True)),
        lines=(
            Line(key="value/explained_variance", name="explained variance", color=0),
            Line(key="value/loss", name="loss", color=1, axis=1),
        ),
    ),
    Panel(
        id="gradient",
        title="Gradient norm",
        about="Before clipping.",
        axes=(Axis(unit="norm", form=".3~g", zero=True), Axis(unit="learning rate", form=".1~e", zero=True)),
        lines=(
            Line(key="policy/grad_norm", name="policy", color=0),
            Line(key="value/grad_norm", name="critic", color=1),
            Line(key="lr", name="learning rate", color=5, axis=1),
        ),
    ),
    Panel(
        id="mismatch",
        title="Sampler against trainer",
        about="The same tokens scored twice; anything but rounding means the engines disagree.",
        axes=(
            Axis(unit="difference of probabilities", form=".1~e", log=True),
            Axis(unit="effective", form=".4~%", share=1),
        ),
        lines=(
            Line(key="mismatch/probs_diff_max", name="largest", color=4, faint=True),
            Line(key="mismatch/probs_diff_mean", name="mean", color=0),
            Line(key="mismatch/ess", name="effective sample size", color=2, axis=1),
        ),
    ),
    Panel(
        id="time",
        title="Time per step",
        about="By part.",
        axes=(Axis(unit="seconds", form=".3~g", zero=True),),
        stack=True,
    ),
    Panel(
        id="memory",
        title="Memory",
        about="The peak of each part.",
        axes=(Axis(unit="GiB", form=".3~g", zero=True),),
        lines=(
            Line(key="memory/rollout_peak", name="rollout", color=0, scale=GIB),
            Line(key="memory/score_peak", name="score", color=2, scale=GIB),
            Line(key="memory/update_peak", name="update", color=1, scale=GIB),
        ),
    ),
    Panel(
        id="throughput",
        title="Throughput",
        about="Tokens sampled and trained on, and episodes without evaluation.",
        axes=(Axis(unit="tokens per second", form=".3~s", zero=True), Axis(unit="episodes per second", zero=True)),
        lines=(
            Line(key="perf/rollout_tokens_per_s", name="rollout", color=0),
            Line(key="perf/update_tokens_per_s", name="update", color=1),
            Line(key="perf/episodes_per_s", name="episodes", color=2, axis=1),
        ),
    ),
)
