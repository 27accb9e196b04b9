"use strict";
// The browser of samples. Prompts, responses and names of rewards are set as text, never HTML.
(() => {
  const { make, at } = klimbReport;
  const PAGE = 50;
  const open = new Set(); // keys of samples that are unfolded
  let samples = [], histories = new Map(), shown = [], page = 0, low = 0, high = 1;

  const keyOf = (s) => `${s.step}/${s.kind}/${s.row}/${s.index}`;
  const promptOf = (s) => `${s.kind}/${s.row}/${s.prompt}`;
  const isNumber = (v) => typeof v === "number";
  const worth = (v) => (v === null ? "none" : isNumber(v) ? String(Number(v.toFixed(4))) : v);
  const verdict = (s) => (s.correct === null ? "none" : s.correct ? "correct" : "wrong");
  const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

  function take(data) {
    samples = data.samples || [];
    histories = new Map();
    for (const s of samples) {
      const key = promptOf(s);
      if (!histories.has(key)) histories.set(key, []);
      histories.get(key).push(s);
    }
    low = Infinity;
    high = -Infinity;
    for (const s of samples) if (isNumber(s.reward)) { low = Math.min(low, s.reward); high = Math.max(high, s.reward); }
  }

  const byReward = (sign) => (a, b) => {
    if (isNumber(a.reward) && isNumber(b.reward)) return sign * (a.reward - b.reward) || a.step - b.step;
    return isNumber(b.reward) - isNumber(a.reward); // those without one go last either way
  };
  const ORDERS = {
    newest: (a, b) => b.step - a.step, oldest: (a, b) => a.step - b.step, high: byReward(-1), low: byReward(1),
    long: (a, b) => b.num_tokens - a.num_tokens, short: (a, b) => a.num_tokens - b.num_tokens,
  };

  function filter() {
    const words = at("search").value.trim().toLowerCase(), kind = at("kind").value, wanted = at("verdict").value;
    shown = samples.filter((s) => (!kind || s.kind === kind) && (!wanted || verdict(s) === wanted)
      && (!words || s.prompt.toLowerCase().includes(words) || s.response.toLowerCase().includes(words)));
    shown.sort(ORDERS[at("order").value]);
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    page = Math.min(page, pages - 1);
    const all = count(samples.length, "sample");
    at("found").textContent = shown.length === samples.length ? all : `${shown.length.toLocaleString("en")} of ${all}`;
    at("page").textContent = `page ${page + 1} of ${pages}`;
    at("previous").disabled = page === 0;
    at("next").disabled = page >= pages - 1;
    const here = shown.slice(page * PAGE, (page + 1) * PAGE);
    const text = samples.length ? "No sample fits the search." : "No samples in this run yet.";
    at("list").replaceChildren(...(here.length ? here.map(row) : [make("p", "nothing", text)]));
  }

  function marked(element, text) {
    // The text with what was searched for marked in it.
    const words = at("search").value.trim().toLowerCase(), lower = text.toLowerCase();
    let from = 0, here = words && lower.length === text.length ? lower.indexOf(words) : -1;
    while (here >= 0) {
      element.append(text.slice(from, here), make("mark", "", text.slice(here, here + words.length)));
      from = here + words.length;
      here = lower.indexOf(words, from);
    }
    element.append(text.slice(from));
    return element;
  }

  function excerpt(text, length) {
    const words = at("search").value.trim().toLowerCase();
    const found = words ? text.toLowerCase().indexOf(words) : -1;
    const from = found > length / 3 ? found - 20 : 0;
    const more = text.length > from + length ? " …" : "";
    return (from ? "… " : "") + text.slice(from, from + length).replace(/\s+/g, " ") + more;
  }

  function reward(s) {
    const box = make("span", "worth"), bar = make("i"), fill = make("span");
    const share = isNumber(s.reward) && high > low ? (s.reward - low) / (high - low) : 0;
    fill.style.width = `${100 * share}%`;
    bar.append(fill);
    box.append(bar, worth(s.reward));
    box.title = "reward";
    return box;
  }

  function row(s) {
    const key = keyOf(s), box = make("div", "row"), head = make("button", "head"), words = make("span", "words");
    head.type = "button";
    head.dataset.key = key;
    const mark = { correct: "✓ correct", wrong: "✗ wrong", none: "" }[verdict(s)];
    head.append(make("span", "", `step ${s.step.toLocaleString("en")}`), make("span", "soft", s.kind === "eval" ? "held-out" : "train"));
    head.append(make("span", verdict(s), s.failure === null ? mark : "failed"), reward(s), make("span", "soft", `${s.num_tokens} tok`));
    words.append(marked(make("b"), excerpt(s.prompt, 160)), marked(make("span"), excerpt(s.response, 220)));
    head.append(words);
    box.append(head);
    const toggle = (unfold) => {
      head.setAttribute("aria-expanded", String(unfold));
      box.classList.toggle("open", unfold);
      if (unfold) box.append(detail(s));
      else box.querySelector(".detail")?.remove();
    };
    head.addEventListener("click", () => {
      const unfold = !open.has(key);
      if (unfold) open.add(key); else open.delete(key);
      toggle(unfold);
    });
    toggle(open.has(key));
    return box;
  }

  function block(title, text) {
    const body = marked(make("pre", "text"), text);
    body.tabIndex = 0;
    return [make("h3", "", title), body];
  }

  function detail(s) {
    const box = make("div", "detail");
    box.append(...block("Prompt", s.prompt), ...block("Response", s.response));
    if (s.answer !== null) box.append(...block("Reference answer", s.answer));
    const parts = make("dl", "parts");
    const say = (name, text) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", text));
      parts.append(pair);
    };
    say("reward", worth(s.reward));
    for (const [name, value] of Object.entries(s.parts)) say(name, worth(value));
    say("tokens", String(s.num_tokens));
    say("ended by", s.finish_reason || "unknown");
    if (s.failure !== null) say("failure", s.failure);
    const more = make("button", "", `This prompt over time (${count(histories.get(promptOf(s)).length, "answer")})`);
    more.type = "button";
    more.addEventListener("click", () => showHistory(s));
    box.append(parts, more);
    return box;
  }

  function showHistory(s) {
    const answers = [...histories.get(promptOf(s))].sort((a, b) => a.step - b.step || a.index - b.index);
    at("history-prompt").textContent = s.prompt;
    at("answers").replaceChildren(...answers.map((answer, i) => {
      const item = make("li"), when = make("div", "when"), text = make("pre", "text");
      when.append(make("strong", "", `step ${answer.step.toLocaleString("en")}`), make("span", "", `reward ${worth(answer.reward)}`));
      if (answer.correct !== null) when.append(make("span", verdict(answer), verdict(answer)));
      when.append(make("span", "", `${answer.num_tokens} tokens`));
      if (i && answers[i - 1].response === answer.response) when.append(make("span", "", "unchanged"));
      for (const [tag, words] of i ? difference(answers[i - 1].response, answer.response) : [["", answer.response]]) {
        text.append(tag ? make(tag, "", words) : words);
      }
      item.append(when, text);
      return item;
    }));
    at("history").showModal();
    at("history").scrollTop = 0;
  }

  function difference(before, after) {
    // Words kept, dropped and new, by the longest common subsequence between the equal ends.
    const a = before.match(/\s+|\w+|[^\s\w]/g) || [], b = after.match(/\s+|\w+|[^\s\w]/g) || [];
    let start = 0, end = 0;
    while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
    while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
    const x = a.slice(start, a.length - end), y = b.slice(start, b.length - end), out = [];
    const push = (tag, word) => {
      if (out.length && out[out.length - 1][0] === tag) out[out.length - 1][1] += word;
      else out.push([tag, word]);
    };
    a.slice(0, start).forEach((word) => push("", word));
    if (x.length * y.length > 4e6) { // too much to compare word by word
      if (x.length) push("del", x.join(""));
      if (y.length) push("ins", y.join(""));
    } else compare(x, y, push);
    a.slice(a.length - end).forEach((word) => push("", word));
    return out;
  }

  function compare(x, y, push) {
    const width = y.length + 1, common = new Uint16Array((x.length + 1) * width);
    for (let i = x.length - 1; i >= 0; i--) {
      for (let j = y.length - 1; j >= 0; j--) {
        common[i * width + j] = x[i] === y[j] ? common[(i + 1) * width + j + 1] + 1
          : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
      }
    }
    let i = 0, j = 0;
    while (i < x.length || j < y.length) {
      if (i < x.length && j < y.length && x[i] === y[j]) { push("", x[i]); i++; j++; }
      else if (j >= y.length || (i < x.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) push("del", x[i++]);
      else push("ins", y[j++]);
    }
  }

  function turn(by) {
    page += by;
    filter();
    at("samples").scrollIntoView({ block: "start" });
    at("list").querySelector(".head")?.focus({ preventScroll: true });
  }

  at("list").addEventListener("keydown", (event) => {
    const heads = [...at("list").querySelectorAll(".head")], here = heads.indexOf(event.target);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: heads.length - 1 }[event.key];
    if (here < 0 || to === undefined || !heads[to]) return;
    event.preventDefault();
    heads[to].focus();
  });
  let waiting = 0;
  at("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { page = 0; filter(); }, 120);
  });
  for (const id of ["kind", "verdict", "order"]) at(id).addEventListener("change", () => { page = 0; filter(); });
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  at("close").addEventListener("click", () => at("history").close());

  klimbReport.onData((data) => {
    // Where somebody reads must stay where it is: same page, same unfolded samples, same focus, same scroll.
    const focused = document.activeElement?.dataset?.key, height = scrollY;
    const ends = () => [samples.length, ...[samples.at(0), samples.at(-1)].filter(Boolean).map(keyOf)].join();
    const before = ends();
    take(data);
    if (ends() === before) return;
    filter();
    if (focused) [...at("list").querySelectorAll(".head")].find((head) => head.dataset.key === focused)?.focus({ preventScroll: true });
    scrollTo({ top: height, behavior: "instant" });
  });
  take(klimbReport.current());
  filter();
})();
