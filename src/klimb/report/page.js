"use strict";
// The page itself: header, tiles, curves, and new data when it is served. What a run wrote is set as text, never HTML.
const klimbReport = (() => {
  const at = (id) => document.getElementById(id);
  const live = document.body.dataset.live === "yes";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const listeners = [];
  const plots = new Map(); // id of a panel -> its div, whether it is drawn, whether what it shows is old
  let data = JSON.parse(at("data").textContent);
  let range = null; // the steps that all curves are zoomed to
  let drawing = false;

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function spark(values, color) {
    const numbers = values.filter((v) => typeof v === "number");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    if (numbers.length < 2) return svg;
    const low = Math.min(...numbers), high = Math.max(...numbers);
    const path = numbers.map((v, i) => {
      const x = (100 * i) / (numbers.length - 1);
      const y = high > low ? 27 - (24 * (v - low)) / (high - low) : 15;
      return `${x.toFixed(2)},${y.toFixed(2)}`;
    });
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", path.join(" "));
    line.setAttribute("fill", "none");
    line.setAttribute("stroke", `var(--${color})`);
    line.setAttribute("stroke-width", "1.6");
    line.setAttribute("stroke-linejoin", "round");
    line.setAttribute("vector-effect", "non-scaling-stroke");
    svg.append(line);
    return svg;
  }

  function showTop() {
    at("name").textContent = data.name;
    document.title = `${data.name} · klimb report`;
    if (at("state").textContent !== data.state_words) at("state").textContent = data.state_words;
    at("state").dataset.state = data.state;
    at("posture").textContent = data.posture;
    at("facts").replaceChildren(...data.facts.map(([name, text]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", text));
      return pair;
    }));
    at("tiles").replaceChildren(...data.tiles.map((tile) => {
      const box = make("div", "tile");
      box.append(make("span", "label", tile.label), make("span", "value", tile.value));
      box.append(make("span", `more ${tile.tone}`, tile.detail), spark(tile.trend, tile.color));
      return box;
    }));
    at("notes").hidden = data.notes.length === 0;
    at("notes").replaceChildren(...data.notes.map((note) => make("p", "", note)));
    at("samples").hidden = at("to-samples").hidden = data.samples === null;
    at("config-title").textContent = data.config_title;
    at("sentences").replaceChildren(...data.sentences.map((text) => make("li", "", text)));
    at("table").hidden = data.table.length === 0;
    at("table").replaceChildren(...(data.table.length ? [table(data.table)] : []));
    at("findings").hidden = data.marks.length === 0;
    at("marks").replaceChildren(...data.marks.map((mark) => {
      const item = make("li");
      const until = mark.end !== null && mark.end > mark.step ? ` to ${mark.end.toLocaleString("en")}` : "";
      item.append(make("span", "when", `step ${mark.step.toLocaleString("en")}${until}`));
      item.append(make("span", mark.severity, mark.label));
      return item;
    }));
    at("missing").hidden = data.missing.length === 0 || data.charts.length === 0;
    at("missing").textContent = `Without data in this run: ${data.missing.join(", ")}.`;
    if (at("config").textContent !== data.config) at("config").textContent = data.config;
  }

  function table([head, ...body]) {
    const out = make("table"), top = make("thead"), rest = make("tbody");
    const line = (cells, tag) => {
      const row = make("tr");
      row.append(...cells.map((text) => make(tag, "", text)));
      return row;
    };
    top.append(line(head, "th"));
    rest.append(...body.map((cells) => line(cells, "td")));
    out.append(top, rest);
    return out;
  }

  function colors() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  }

  function themed({ figure, off }) {
    const color = colors();
    const tones = { error: "bad", warning: "warn", info: "soft", action: "c3" };
    const traces = figure.data.map((trace) => {
      const out = { ...trace, visible: !off.has(trace.legendgroup || trace.name) };
      if (trace.meta === "band") return trace.fill ? { ...out, fillcolor: color("band") } : out;
      const own = color(trace.meta);
      if (trace.line) out.line = { ...trace.line, color: own };
      if (trace.marker) out.marker = { ...trace.marker, color: own };
      if (trace.stackgroup) out.fillcolor = own + "b8";
      return out;
    });
    const layout = structuredClone(figure.layout);
    const grid = { gridcolor: color("grid"), zeroline: false, linecolor: color("line") };
    for (const key of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) Object.assign(layout[key], grid);
    Object.assign(layout.xaxis, { showgrid: false, showline: true, ticks: "outside", ticklen: 4, tickcolor: color("line"),
      showspikes: true, spikemode: "across", spikethickness: -2, spikedash: "solid", spikecolor: color("soft"), nticks: 8 });
    for (const key of ["yaxis", "yaxis2"]) if (layout[key]) Object.assign(layout[key], { nticks: key === "yaxis" ? 6 : 4, fixedrange: true });
    for (const shape of layout.shapes) {
      const tone = color(tones[shape.name]);
      if (shape.type === "rect") shape.fillcolor = tone;
      shape.line.color = tone;
    }
    for (const note of layout.annotations) {
      note.font = { size: 11, color: color(note.name === "unit" ? "soft" : tones[note.name]) };
    }
    if (range) layout.xaxis.range = [...range];
    return [traces, Object.assign(layout, {
      uirevision: String(range), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: coarse.matches ? false : "zoom",
      margin: { l: 52, r: 10, t: 36, b: 28 }, font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: color("soft") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 12 }, namelength: 24 },
    })];
  }

  function draw(id) {
    const plot = plots.get(id);
    if (!drawing || !plot || !plot.seen || !plot.stale || plot.queued) return;
    plot.queued = true;
    setTimeout(() => { // one at a time, so that the first is there before the last is computed
      plot.queued = plot.stale = false;
      const [traces, layout] = themed(plot);
      const options = { displayModeBar: false, responsive: true, doubleClick: false };
      Plotly.react(plot.div, traces, layout, options).then(() => {
        plot.div.dataset.drawn = "yes";
        if (plot.listening) return;
        plot.listening = true;
        plot.div.on("plotly_relayout", (change) => {
          if ("xaxis.range[0]" in change) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
        });
        plot.div.on("plotly_doubleclick", () => zoom(null));
      });
    });
  }

  function zoom(to) {
    range = to;
    at("reset").hidden = !range;
    redraw();
  }

  function showLegend(plot) {
    const named = plot.figure.data.filter((trace) => trace.showlegend !== false);
    const wanted = named.map((trace) => trace.name).join();
    if (plot.named === wanted) return;
    plot.named = wanted;
    plot.legend.replaceChildren(...named.map((trace) => {
      const button = make("button"), swatch = make("i", trace.fill || trace.stackgroup ? "area" : "");
      const color = `var(--${trace.meta})`, group = trace.legendgroup || trace.name;
      button.type = "button";
      if (trace.fill || trace.stackgroup) swatch.style.background = color;
      else swatch.style.borderTop = `${trace.opacity ? 2 : 3}px ${{ dash: "dashed", dot: "dotted" }[trace.line?.dash] || "solid"} ${color}`;
      button.setAttribute("aria-pressed", String(!plot.off.has(group)));
      button.append(swatch, trace.name);
      button.addEventListener("click", () => {
        if (!plot.off.delete(group)) plot.off.add(group);
        button.setAttribute("aria-pressed", String(!plot.off.has(group)));
        plot.stale = true;
        draw(plot.div.dataset.panel);
      });
      return button;
    }));
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const plot = plots.get(entry.target.dataset.panel);
      if (!plot) continue;
      plot.seen = entry.isIntersecting;
      draw(entry.target.dataset.panel);
    }
  }, { rootMargin: "500px" });

  function describe(chart) {
    const last = chart.figure.data.filter((trace) => trace.hovertemplate && trace.meta !== "bad").map((trace) => {
      const value = trace.y.findLast((v) => v !== null);
      return value === undefined ? null : `${trace.name} ${value}`;
    }).filter(Boolean);
    return `${chart.title} over the steps. Last values: ${last.join(", ")}.`;
  }

  function showCharts() {
    const wanted = new Set(data.charts.map((chart) => chart.id));
    for (const [id, plot] of plots) if (!wanted.has(id)) { watcher.unobserve(plot.div); plot.div.parentElement.remove(); plots.delete(id); }
    at("charts-hint").hidden = data.charts.length === 0 || coarse.matches;
    for (const old of at("charts").querySelectorAll(".nothing")) old.remove();
    if (data.charts.length === 0) at("charts").append(make("p", "chart nothing", "No step is finished yet, so there is nothing to draw."));
    data.charts.forEach((chart, i) => {
      let plot = plots.get(chart.id);
      if (!plot) {
        const card = make("article", "chart");
        const div = make("div", "plot");
        div.dataset.panel = chart.id;
        div.setAttribute("role", "img");
        const legend = make("div", "legend");
        card.append(make("h3", "", chart.title), make("p", "about", chart.about), legend, div);
        at("charts").insertBefore(card, at("charts").children[i] || null);
        plot = { div, legend, seen: false, off: new Set() };
        plots.set(chart.id, plot);
        watcher.observe(div);
      }
      plot.figure = chart.figure;
      plot.stale = true;
      showLegend(plot);
      plot.div.setAttribute("aria-label", describe(chart));
      draw(chart.id);
    });
  }

  function redraw() {
    for (const [id, plot] of plots) { plot.stale = true; draw(id); }
  }

  function drawCharts() {
    drawing = true;
    redraw();
  }

  async function poll(tag) {
    let next = tag;
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        data = await answer.json();
        next = answer.headers.get("ETag");
        showTop();
        showCharts();
        for (const tell of listeners) tell(data);
      } else if (answer.status !== 304) throw new Error(await answer.text());
      at("pulse").textContent = "follows the run";
    } catch (error) {
      at("pulse").textContent = error instanceof TypeError ? "the report server does not answer" : error.message;
    }
    setTimeout(poll, 2000, next);
  }

  dark.addEventListener("change", redraw);
  at("reset").addEventListener("click", () => zoom(null));
  addEventListener("beforeprint", () => { for (const plot of plots.values()) plot.seen = true; redraw(); });
  showTop();
  showCharts();
  if (live) {
    at("pulse").hidden = false;
    at("pulse").textContent = "follows the run";
    setTimeout(poll, 2000, null);
  }
  return { drawCharts, make, at, current: () => data, onData: (tell) => listeners.push(tell) };
})();
