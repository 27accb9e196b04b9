"""The report as one HTML page that needs nothing else, not even a network.

What a model wrote comes in as JSON inside a script element that no browser runs, and is shown as text. The page's
own scripts are named by their hashes in its security policy, so nothing else could run even if it got in.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from klimb.errors import MissingExtra
from klimb.report.charts import build_charts
from klimb.report.files import RunFiles
from klimb.report.overview import STATES, all_marks, facts, posture, tiles
from klimb.version import VERSION

ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
DRAW = "klimbReport.drawCharts();"


def build_data(run: RunFiles) -> dict[str, Any]:
    """All that the page shows."""
    marks = all_marks(run)
    charts, missing = build_charts(run.rows, marks)
    return {
        "name": run.name,
        "state": run.state,
        "state_words": STATES[run.state],
        "posture": posture(run.config),
        "facts": facts(run),
        "tiles": tiles(run),
        "notes": run.notes,
        "marks": [asdict(mark) for mark in marks],
        "charts": [
            {"id": c.panel.id, "title": c.panel.title, "about": c.panel.about, "figure": c.figure} for c in charts
        ],
        "missing": missing,
        "sentences": [],
        "table": [],
        "samples": run.samples,
        "config_title": "Configuration of the run",
        "config": run.config_text,
    }


def to_json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    lone = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
    return lone.translate(ESCAPED)


def build_page(run: RunFiles, live: bool = False) -> str:
    """The HTML. live: the page asks the server it came from for new data."""
    return render(build_data(run), live)


def render(data: dict[str, Any], live: bool = False) -> str:
    """The page around such data. Without samples (None) it has no browser of them; `sentences` are what
    it says at the top, `table` a header and rows."""
    # The samples come last: the first curves are what one looks at first.
    scripts = [_script(text) for text in (_asset("page.js"), plotly_source(), DRAW, _asset("samples.js"))]
    template = Environment(autoescape=True).from_string(_asset("page.html"))
    return template.render(
        name=data["name"],
        version=VERSION,
        policy=policy(scripts, live),
        style=Markup(_asset("page.css")),
        scripts=[Markup(text) for text in scripts],
        data=Markup(to_json(data)),
        live=live,
    )


def policy(scripts: Sequence[str], live: bool) -> str:
    """Content security policy: these scripts, inline styles (plotly writes them), pictures made in the page."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;{connect} "
        "base-uri 'none'; form-action 'none'"
    )


def plotly_source() -> str:
    """plotly.js as the plotly package ships it; the package itself is not imported, which would take a second."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise MissingExtra("plotly", "report", "klimb report")
    return _unwrapped((Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8"))


def _asset(name: str) -> str:
    return (files("klimb.report") / name).read_text(encoding="utf-8")


def _unwrapped(source: str) -> str:
    """plotly.js without its wrapper for module loaders, which makes a browser parse the whole twice (a third of the
    page's loading time). Its notices stay. A plotly.js that looks otherwise is left as it is."""
    start, end = source.find('"use strict";var Plotly='), source.rfind("return Plotly;")
    notice = source.find("*/")
    if not 0 < notice < start < end:
        return source
    return source[: notice + 2] + "\n" + source[start:end]


def _script(text: str) -> str:
    """Text that an HTML parser hands on unchanged, as the hash needs it."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script")


def _finite(data: Any) -> Any:
    """Numbers that are not finite by their name, as in the log; JSON has none."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
