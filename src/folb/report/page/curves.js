// Accuracy, or another measure, and loss: median lines with bands over the seeds.

const AXES = { round: "Rounds", mb: "MB up and down", seconds: "Simulated seconds" };
const CROWD = 2; // the most points of a curve for each pixel of a chart's width
const CROWDS = 60000; // the most points of the lines of single seeds, together
const MANY = 7; // algorithms: with more, one button shows all, another none
const READ = 12; // the most algorithms whose values are shown at the cross-hair

function swatch(style) {
  const line = s("line", { x1: 1, x2: 27, y1: 5, y2: 5, class: `line ${style}` });
  return s("svg", { class: "swatch", width: 28, height: 10, "aria-hidden": "true" }, line);
}

/** One measure of all algorithms. `curves` has what both charts share, such as the axis. */
class Chart {
  constructor(curves, shown) {
    this.curves = curves;
    this.svg = s("svg", { tabindex: 0, role: "application", "aria-roledescription": "chart", class: "chart" });
    this.readout = h("div", { class: "readout", hidden: true });
    const file = (kind, make) => button(kind, async () => save(`${curves.name}-${this.measure}.${kind}`, await make()));
    this.files = [
      file("svg", () => new Blob([this.alone().text], { type: "image/svg+xml" })),
      file("png", () => pixels(this.alone())),
    ];
    this.caption = h("span");
    this.node = h("figure", {}, h("figcaption", {}, this.caption, h("span", { class: "downloads" }, ...this.files)),
      h("div", { class: "plot" }, this.svg, this.readout));
    this.show(shown);
    const heard = (act) => (step) => {
      act(step);
      curves.say(this.readout.hidden ? "" : this.reading());
    };
    interact(this.svg, {
      place: (event) => position(event, this.svg, this.width),
      hover: (point) => curves.point(point && this.at(point)),
      drag: (from, to) => this.select(from, to),
      zoom: (from, to) => curves.zoom([this.at(from), this.at(to)].sort(ascending)),
      keys: {
        ArrowLeft: heard((step) => curves.step(-step)),
        ArrowRight: heard((step) => curves.step(step)),
        Home: heard(() => curves.step(-Infinity)),
        End: heard(() => curves.step(Infinity)),
        "+": () => curves.magnify(0.5),
        "-": () => curves.magnify(2),
        Escape: () => curves.zoom(null),
      },
    });
  }

  /** Show this measure from now on: its name, a title, whether the target is for it, and how a value is written. */
  show({ measure, title, aimed = false, log = false, lower = false, value }) {
    Object.assign(this, { measure, title, aimed, log, lower, value });
    this.caption.textContent = title;
    for (const node of this.files) node.setAttribute("aria-label", `${title} as ${node.textContent}`);
  }

  /** The target on this chart's scale, if it has one. */
  get target() {
    return this.aimed ? this.curves.by.factor * this.curves.target : null;
  }

  /** The chart as a picture of its own. */
  alone() {
    const lines = [...this.svg.querySelectorAll(".line.median")];
    const arms = this.shown.map(({ label }, i) => {
      const { stroke, strokeWidth, strokeDasharray } = getComputedStyle(lines[i]);
      const line = s("line", { stroke, "stroke-width": strokeWidth, "stroke-dasharray": strokeDasharray });
      return { label, line };
    });
    return alone(this.svg, `${this.title}: ${this.curves.name}`, arms);
  }

  /** The value of the horizontal axis at a point. */
  at({ x }) {
    const { left, right } = this.frame;
    const [low, high] = this.curves.domain();
    return low + ((clamp(x, left, right) - left) / (right - left)) * (high - low);
  }

  draw() {
    const { curves, svg } = this;
    this.width = Math.max(280, this.node.clientWidth);
    const height = clamp(0.62 * this.width, 240, 380);
    const frame = (this.frame = { left: 50, right: this.width - 18, top: 10, bottom: height - 42 });
    const [low, high] = curves.domain();
    this.shown = curves.shown().map((arm) => ({ ...arm, ...curves.band(arm, this.measure) }));
    const log = this.log && curves.log;
    const range = this.range(low, high, log);
    const y = scale(range, [frame.bottom, frame.top], log);
    this.x = scale([low, high], [frame.left, frame.right]);
    this.y = (value) => clamp(log && value <= 0 ? frame.bottom : y(value), frame.top, frame.bottom);

    const clip = `clip-${curves.id}-${this.measure}`;
    const area = { x: frame.left, y: frame.top, width: frame.right - frame.left, height: frame.bottom - frame.top };
    const inside = s("g", { "clip-path": `url(#${clip})` });
    const aim = this.target > range[0] && this.target < range[1] ? this.aim(y(this.target)) : [];
    const several = this.shown.filter((arm) => arm.seeds > 1);
    const areas = curves.seeds ? this.seeds(several, low, high) : several.map((arm) => this.area(arm, low, high));
    const lines = this.shown.map((arm) => this.line(arm, low, high, "median"));
    inside.append(...areas, ...lines, ...aim);
    this.cross = s("g", { class: "cross" });
    this.selection = s("rect", { class: "selection", ...area, width: 0 });
    const axes = this.axes(y, [low, high], range, log);
    svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    svg.setAttribute("aria-label", this.described());
    svg.replaceChildren(s("clipPath", { id: clip }, s("rect", area)), axes, inside, this.cross, this.selection);
    this.point();
  }

  /** The values to make room for: those of the shown part, and the target if everything is shown. */
  range(from, to, log) {
    const values = this.target !== null && !this.curves.part ? [this.target] : [];
    const seeds = this.curves.seeds ? this.shown.flatMap(({ runs }) => runs) : [];
    const own = seeds.filter(({ curves }) => curves[this.measure]);
    const alone = own.map(({ x, curves: { [this.measure]: values } }) => {
      return { xs: x[this.curves.axis], low: values, high: values };
    });
    for (const { xs, low, high } of [...this.shown, ...alone]) {
      for (let i = Math.max(0, last(xs, from)); i < xs.length && xs[i] <= to; i++) values.push(low[i], high[i]);
    }
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (!Number.isFinite(value) || (log && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return [0.1, 1];
    const room = 0.04;
    if (log) return low === high ? [low / 2, 2 * high] : [low * (low / high) ** room, high * (high / low) ** room];
    const margin = room * (high - low) || 0.5;
    return [Math.max(0, low - margin), high + margin];
  }

  axes(y, domain, range, log) {
    const { left, right, top, bottom } = this.frame;
    const node = s("g", { class: "axes" });
    for (const { value, text } of (log ? logTicks : ticks)(...range, Math.max(3, (bottom - top) / 50))) {
      node.append(s("line", { x1: left, x2: right, y1: y(value), y2: y(value) }));
      node.append(s("text", { class: "y", x: left - 7, y: y(value) }, text));
    }
    for (const { value, text } of ticks(...domain, Math.max(3, (right - left) / 90))) {
      const x = this.x(value);
      node.append(s("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      node.append(s("text", { class: "x", x, y: bottom + 17 }, text));
    }
    node.append(s("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
    node.append(s("text", { class: "x name", x: (left + right) / 2, y: bottom + 36 }, AXES[this.curves.axis]));
    return node;
  }

  aim(y) {
    const { left, right, top } = this.frame;
    const line = s("line", { class: "target", x1: left, x2: right, y1: y, y2: y });
    const above = y - top > 18; // where the words have room
    return [line, s("text", { class: "target", x: right - 4, y: above ? y - 5 : y + 14 }, `target ${digits(this.target, 4)}${this.curves.by.unit === "%" ? " %" : ""}`)];
  }

  /** The points of a band to draw: those in sight and one more on each side, fewer where they are dense. */
  points(xs, low, high, most = CROWD * this.width) {
    const first = Math.max(0, last(xs, low));
    const end = Math.min(xs.length, last(xs, high) + 2);
    const every = Math.ceil((end - first) / most);
    const places = [];
    for (let i = first; i < end - 1; i += every) places.push(i);
    return end > first ? [...places, end - 1] : [];
  }

  spot(x, y) {
    return `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
  }

  line({ xs, middle, style }, low, high, kind, most) {
    let path = "";
    let pen = "M";
    for (const i of this.points(xs, low, high, most)) {
      if (Number.isFinite(middle[i])) path += pen + this.spot(xs[i], middle[i]);
      pen = Number.isFinite(middle[i]) ? "L" : "M";
    }
    return s("path", { class: `line ${kind} ${style}`, d: path });
  }

  /** A thin line for every seed of these arms; the more lines, the fewer points each has. */
  seeds(arms, low, high) {
    const count = arms.reduce((sum, { runs }) => sum + runs.length, 0);
    const most = clamp(Math.floor(CROWDS / count), 100, CROWD * this.width);
    return arms.flatMap(({ runs, style }) => runs.filter((run) => run.curves[this.measure]).map((run) => {
      const { x, curves: { [this.measure]: middle } } = run;
      return this.line({ xs: x[this.curves.axis], middle, style }, low, high, "seed", most);
    }));
  }

  area({ xs, low, high, style }, from, to) {
    const points = this.points(xs, from, to);
    const above = points.map((i) => this.spot(xs[i], high[i]));
    const below = points.map((i) => this.spot(xs[i], low[i])).reverse();
    return s("path", { class: `area ${style}`, d: points.length ? `M${[...above, ...below].join("L")}Z` : "" });
  }

  described() {
    const ended = this.shown.filter(({ xs }) => xs.length);
    const ends = ended.slice(0, READ).map(({ label, middle }) => `${label} is at ${this.value(middle.at(-1))}`);
    const what = `${this.title} by ${AXES[this.curves.axis].toLowerCase()}. ${ends.join(", ") || "No values yet"}.`;
    return `${what} Arrow keys read values, plus and minus zoom, Escape shows all. The results are in the table below.`;
  }

  /** The cross-hair, and the values there. */
  point() {
    const { at } = this.curves;
    const { left, right, top, bottom } = this.frame;
    this.cross.replaceChildren();
    this.readout.hidden = at === null || this.x(at) < left - 1 || this.x(at) > right + 1;
    if (this.readout.hidden) return;
    const x = this.x(at);
    this.cross.append(s("line", { x1: x, x2: x, y1: top, y2: bottom }));
    const values = this.values(at);
    const rows = values.slice(0, READ).map(({ style, label, low, middle, high, seeds }) => {
      if (Number.isFinite(middle)) this.cross.append(s("circle", { class: style, cx: x, cy: this.y(middle), r: 3.5 }));
      const spread = seeds > 1 ? `${this.value(low)} – ${this.value(high)}` : "";
      return h("tr", {}, h("th", {}, swatch(style), label), h("td", {}, this.value(middle)), h("td", {}, spread));
    });
    if (values.length > READ) rows.push(h("tr", {}, h("th", {}, `and ${whole(values.length - READ)} more`)));
    this.readout.replaceChildren(h("table", {}, h("caption", {}, this.curves.where()), h("tbody", {}, ...rows)));
    const width = this.readout.offsetWidth;
    this.readout.style.left = `${Math.max(0, x + 14 + width > this.width ? x - 14 - width : x + 14)}px`;
  }

  /** The values of each algorithm at a value of the horizontal axis; if there are many, the best come first. */
  values(at) {
    const there = this.shown.filter(({ xs }) => xs.length && at >= xs[0] && at <= xs.at(-1));
    const read = there.map(({ style, label, xs, low, middle, high, seeds }) => {
      const i = last(xs, at);
      return { style, label, seeds, low: low[i], middle: middle[i], high: high[i] };
    });
    const sign = this.lower ? 1 : -1;
    return read.length > READ ? read.sort((a, b) => sign * ascending(a.middle, b.middle)) : read;
  }

  /** The read-out, for screen readers. */
  reading() {
    const values = this.values(this.curves.at).slice(0, READ);
    return `${this.curves.where()}: ${values.map(({ label, middle }) => `${label} ${this.value(middle)}`).join(", ")}`;
  }

  select(from, to) {
    const { left, right } = this.frame;
    const [a, b] = from ? [from.x, to.x].sort(ascending).map((x) => clamp(x, left, right)) : [0, 0];
    this.selection.setAttribute("x", a);
    this.selection.setAttribute("width", b - a);
  }
}

/** Algorithms with their runs, as curves and rows show them. Each run has a label and a style of folb.report.looks. */
function armsOf(runs, labels, styles) {
  const arms = new Map();
  runs.forEach((run, i) => {
    if (!arms.has(labels[i])) arms.set(labels[i], { label: labels[i], runs: [], style: styles[i] });
    arms.get(labels[i]).runs.push(run);
  });
  return [...arms.values()];
}

/** Both charts, their legend and their switches. `aim` is called when the target has moved. */
class Curves {
  keys = ["axis", "metric", "zoom", "hidden", "shown", "target", "seeds", "loss"];
  axis = "round";
  log = true;
  seeds = false; // whether each seed has a line
  part = null; // the part of the axis that is shown; null: all
  at = null; // where the cross-hair is
  hidden = new Set();
  bands = new Map();
  xs = []; // the places on the axis where a shown algorithm has a value

  /** The first of `measures` is what the runs are judged by; each has a name, a title, a factor and a unit. */
  constructor({ id, name, arms, measures, target, aim }) {
    Object.assign(this, { id, name, arms, measures, target, aim, stored: target, by: measures[0] });
    this.metric = this.by.name; // the measure that is shown next to the loss
    const loss = { measure: "loss", title: "Training loss", log: true, lower: true, value: written((x) => digits(x, 4)) };
    this.charts = [new Chart(this, this.chosen()), new Chart(this, loss)];
    this.heard = h("p", { class: "heard", role: "status" });
    this.all = button("Show all", () => this.zoom(null));
    const counts = arms.map(({ runs }) => runs.length);
    const most = Math.max(...counts);
    const over = counts.every((count) => count === most) ? `${most} seeds` : "the seeds";
    const median = `Lines are medians over ${over}; bands show their range, or thin lines the single seeds. `;
    const how = "Drag to zoom; double-click or Escape shows all. Arrow keys read values, + and − zoom.";
    const kept = " The address keeps what is shown.";
    this.node = h("div", { class: "curves" }, this.legend(), this.switches(most > 1),
      h("div", { class: "charts" }, ...this.charts.map((chart) => chart.node)),
      h("p", { class: "hint" }, (most > 1 ? median : "") + how + kept), this.heard);
    onResize(this.charts[0].node, () => this.charts[0].width, () => this.draw());
  }

  legend() {
    this.buttons = this.arms.map((arm) => {
      const turn = () => this.hidden.delete(arm) || this.hidden.add(arm);
      return fill(button(swatch(arm.style), () => this.change(turn)), {}, [arm.label]);
    });
    const both = [["All", []], ["None", this.arms]].map(([text, hidden]) => {
      return fill(button(text, () => this.change(() => (this.hidden = new Set(hidden)))), { class: "quick" }, []);
    });
    const quick = this.arms.length > MANY ? both : [];
    return h("div", { class: "legend", role: "group", "aria-label": "Algorithms shown" }, ...this.buttons, ...quick);
  }

  /** What the first chart shows. */
  chosen() {
    const { name, title, unit, lower } = this.measures.find((known) => known.name === this.metric);
    const value = written((x) => (unit === "%" ? decimals(x, 1) : digits(x, 4)));
    const errors = !unit && lower; // as a loss
    return { measure: name, title, aimed: name === this.by.name, log: errors, lower, value };
  }

  switches(several) {
    const metrics = Object.fromEntries(this.measures.map(({ name, short }) => [name, short]));
    this.metrics = choice("Metric", `metric-${this.id}`, metrics, (metric) => this.change(() => (this.metric = metric)));
    this.metrics.hidden = this.measures.length < 2;
    this.axes = choice("Horizontal axis", `axis-${this.id}`, AXES, (axis) => {
      this.change(() => Object.assign(this, { axis, part: null, at: null }));
    });
    const check = (key) => {
      const box = h("input", { type: "checkbox", onchange: () => this.change(() => (this[key] = box.checked)) });
      return box;
    };
    this.logBox = check("log");
    this.seedsBox = check("seeds");
    const most = this.by.unit === "%" ? { max: 100 } : {};
    this.goal = h("input", { type: "number", min: 0, ...most, step: "any", class: "goal", onchange: () => {
      const goal = this.aimedAt(this.goal.value);
      this.change(() => (this.target = goal ?? this.target));
    } });
    this.back = button("", () => this.change(() => (this.target = this.stored)));
    const files = button("csv", () => save(`${this.name}-curves.csv`, csv(curvesRows(this.shown(), this.measures))));
    const unit = this.by.unit ? ` (${this.by.unit})` : "";
    return h("div", { class: "controls" }, this.axes, this.metrics, h("label", {}, this.logBox, "Logarithmic loss"),
      several ? h("label", {}, this.seedsBox, "Single seeds") : "",
      h("span", { class: "aim" }, h("label", {}, `Target${unit} `, this.goal), this.back), this.all,
      fill(files, { "aria-label": "Curves as csv", class: "downloads" }, []));
  }

  /** Change what is shown, and draw it again. */
  change(act) {
    act();
    this.draw();
    address.write();
  }

  /** What differs from the first state, for the address. */
  pairs() {
    const pairs = [];
    if (this.axis !== "round") pairs.push(["axis", this.axis]);
    if (this.part) pairs.push(["zoom", this.part.map((x) => Number(x.toPrecision(6))).join("_")]);
    const few = this.hidden.size > this.arms.length / 2 ? "shown" : "hidden"; // the shorter list
    for (const { label } of few === "shown" ? this.shown() : this.hidden) pairs.push([few, label]);
    if (few === "shown" && !this.shown().length) pairs.push(["shown", ""]);
    if (this.metric !== this.by.name) pairs.push(["metric", this.metric]);
    if (this.target !== this.stored) pairs.push(["target", aimed(this.target, this.by)]);
    if (this.seeds) pairs.push(["seeds", "each"]);
    if (!this.log) pairs.push(["loss", "linear"]);
    return pairs;
  }

  /** Show what an address asks for. What does not fit is returned, and keeps its first state. */
  follow(fields) {
    const wrong = [];
    const one = (key, first, take) => {
      const text = fields.get(key)?.at(-1);
      const taken = text === undefined ? first : take(text);
      if (taken === undefined) wrong.push(`${key}=${text}`);
      return taken ?? first;
    };
    this.axis = one("axis", "round", (text) => (Object.hasOwn(AXES, text) ? text : undefined));
    const known = (text) => (this.measures.some(({ name }) => name === text) ? text : undefined);
    this.metric = one("metric", this.by.name, known);
    this.target = one("target", this.stored, (text) => this.aimedAt(text) ?? undefined);
    this.seeds = one("seeds", false, (text) => (text === "each" ? true : undefined));
    this.log = one("loss", true, (text) => (text === "linear" ? false : undefined));
    const named = (key) => {
      const labels = fields.get(key) ?? [];
      const known = this.arms.filter(({ label }) => labels.includes(label));
      const others = labels.filter((label) => label && !known.some((arm) => arm.label === label));
      wrong.push(...others.map((label) => `${key}=${label}`));
      return known;
    };
    const shown = named("shown");
    const none = fields.get("shown")?.includes("");
    this.hidden = new Set(shown.length || none ? this.arms.filter((arm) => !shown.includes(arm)) : named("hidden"));
    this.measure();
    const end = this.end();
    this.part = one("zoom", null, (text) => {
      const [from, to, ...rest] = text.split("_").map((word) => (word.trim() ? Number(word) : NaN));
      const fits = !rest.length && from >= 0 && from < Math.min(to, end) && to < Infinity;
      return fits ? this.within([from, to]) : undefined;
    });
    this.at = null;
    this.draw();
    return wrong;
  }

  /** A target from text, or null: a percentage, or any number that is not negative. */
  aimedAt(text) {
    const target = String(text).trim() ? Number(text) : NaN;
    const [most, factor] = this.by.unit === "%" ? [100, 100] : [Number.MAX_VALUE, 1];
    return target >= 0 && target <= most ? Number(target.toPrecision(6)) / factor : null;
  }

  shown() {
    return this.arms.filter((arm) => !this.hidden.has(arm));
  }

  band(arm, measure) {
    const key = `${arm.label}\n${this.axis}\n${measure}`;
    if (!this.bands.has(key)) this.bands.set(key, band(arm.runs, this.axis, measure));
    return this.bands.get(key);
  }

  end() {
    return this.xs.at(-1) || 1;
  }

  domain() {
    return this.part ?? [0, this.end()];
  }

  where() {
    if (this.axis === "round") return `round ${whole(this.at)}`;
    return `${digits(this.at, 4)} ${this.axis === "mb" ? "MB" : "s"}`;
  }

  zoom(part) {
    this.change(() => (this.part = part && this.within(part)));
  }

  /** A part of the axis that is neither too short nor beyond the end; null if it is all of it. */
  within(part) {
    const end = this.end();
    const length = clamp(part[1] - part[0], end / 1e4, end);
    const from = clamp(part[0], 0, end - length);
    return length > 0.999 * end ? null : [from, from + length];
  }

  magnify(factor) {
    const [low, high] = this.domain();
    const half = ((high - low) * factor) / 2;
    const centre = this.at ?? (low + high) / 2;
    this.zoom([centre - half, centre + half]);
  }

  /** Put the cross-hair at the value nearest to x. */
  point(x) {
    const i = last(this.xs, x);
    const near = this.xs.slice(Math.max(0, i), i + 2).sort((a, b) => Math.abs(a - x) - Math.abs(b - x));
    this.at = x === null ? null : (near[0] ?? null);
    for (const chart of this.charts) chart.point();
  }

  /** Move the cross-hair by this many values, and the shown part with it. */
  step(by) {
    const [low, high] = this.domain();
    const from = last(this.xs, this.at ?? (low + high) / 2);
    const at = this.xs[clamp(from + by, 0, this.xs.length - 1)];
    if (at === undefined) return;
    if (at < low) this.zoom([at, at + high - low]);
    if (at > high) this.zoom([at - high + low, at]);
    this.point(at);
  }

  say(text) {
    this.heard.textContent = text;
  }

  /** Find the places on the axis. */
  measure() {
    this.xs = [...new Set(this.shown().flatMap((arm) => this.band(arm, this.by.name).xs))].sort(ascending);
  }

  /** Draw again; read the data again if they have changed. */
  draw(changed = false) {
    if (changed) this.bands.clear();
    this.measure();
    this.all.disabled = !this.part;
    this.arms.forEach((arm, i) => this.buttons[i].setAttribute("aria-pressed", !this.hidden.has(arm)));
    for (const input of this.axes.querySelectorAll("input")) input.checked = input.value === this.axis;
    for (const input of this.metrics.querySelectorAll("input")) input.checked = input.value === this.metric;
    this.charts[0].show(this.chosen());
    this.logBox.checked = this.log;
    this.seedsBox.checked = this.seeds;
    this.goal.value = aimed(this.target, this.by);
    this.back.textContent = `Back to ${goal(this.stored, this.by)}`;
    this.back.hidden = this.target === this.stored;
    for (const chart of this.charts) chart.draw();
    this.aim(this.target);
  }
}

/** How a value is written, if there is one. */
function written(text) {
  return (x) => (Number.isFinite(x) ? text(x) : Number.isNaN(x) ? "not measured" : "diverged");
}
