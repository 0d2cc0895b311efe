// Accuracy and loss: median lines with bands over the seeds.

const AXES = { round: "Rounds", mb: "MB up and down", seconds: "Simulated seconds" };
const CROWD = 2000; // the most points of a curve that a chart draws

function swatch(style) {
  const line = s("line", { x1: 1, x2: 27, y1: 5, y2: 5, class: `line ${style}` });
  return s("svg", { class: "swatch", width: 28, height: 10, "aria-hidden": "true" }, line);
}

/** One measure of all algorithms. `curves` has what both charts share, such as the axis. */
class Chart {
  constructor(curves, { measure, title, target = null, log = false, value }) {
    Object.assign(this, { curves, measure, title, target, log, value });
    this.svg = s("svg", { tabindex: 0, role: "application", "aria-roledescription": "chart", class: "chart" });
    this.readout = h("div", { class: "readout", hidden: true });
    this.node = h("figure", {}, h("figcaption", {}, title), h("div", { class: "plot" }, this.svg, this.readout));
    const heard = (act) => (step) => {
      act(step);
      curves.say(this.readout.hidden ? "" : this.told());
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
    this.shown = curves.shown().map((group) => ({ ...group, ...curves.band(group, this.measure) }));
    const log = this.log && curves.log;
    const range = this.range(low, high, log);
    const y = scale(range, [frame.bottom, frame.top], log);
    this.x = scale([low, high], [frame.left, frame.right]);
    this.y = (value) => clamp(log && value <= 0 ? frame.bottom : y(value), frame.top, frame.bottom);

    const clip = `clip-${curves.id}-${this.measure}`;
    const area = { x: frame.left, y: frame.top, width: frame.right - frame.left, height: frame.bottom - frame.top };
    const inside = s("g", { "clip-path": `url(#${clip})` });
    const aim = this.target > range[0] && this.target < range[1] ? this.aim(y(this.target)) : [];
    const areas = this.shown.filter((group) => group.seeds > 1).map((group) => this.area(group, low, high));
    const lines = this.shown.map((group) => this.line(group, low, high));
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
    for (const { xs, low, high } of this.shown) {
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
    const { left, right } = this.frame;
    const line = s("line", { class: "target", x1: left, x2: right, y1: y, y2: y });
    return [line, s("text", { class: "target", x: right - 4, y: y - 5 }, `target ${digits(this.target, 4)} %`)];
  }

  /** The points of a band to draw: those in sight and one more on each side, fewer where they are dense. */
  points(xs, low, high) {
    const first = Math.max(0, last(xs, low));
    const end = Math.min(xs.length, last(xs, high) + 2);
    const every = Math.ceil((end - first) / CROWD);
    const found = [];
    for (let i = first; i < end - 1; i += every) found.push(i);
    return end > first ? [...found, end - 1] : [];
  }

  spot(x, y) {
    return `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
  }

  line({ xs, middle, style }, low, high) {
    let path = "";
    let pen = "M";
    for (const i of this.points(xs, low, high)) {
      if (Number.isFinite(middle[i])) path += pen + this.spot(xs[i], middle[i]);
      pen = Number.isFinite(middle[i]) ? "L" : "M";
    }
    return s("path", { class: `line ${style}`, d: path });
  }

  area({ xs, low, high, style }, from, to) {
    const points = this.points(xs, from, to);
    const above = points.map((i) => this.spot(xs[i], high[i]));
    const below = points.map((i) => this.spot(xs[i], low[i])).reverse();
    return s("path", { class: `area ${style}`, d: points.length ? `M${[...above, ...below].join("L")}Z` : "" });
  }

  described() {
    const ended = this.shown.filter(({ xs }) => xs.length);
    const ends = ended.map(({ label, middle }) => `${label} is at ${this.value(middle.at(-1))}`);
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
    const rows = this.values(at).map(({ style, label, low, middle, high, seeds }) => {
      if (Number.isFinite(middle)) this.cross.append(s("circle", { class: style, cx: x, cy: this.y(middle), r: 3.5 }));
      const spread = seeds > 1 ? `${this.value(low)} – ${this.value(high)}` : "";
      return h("tr", {}, h("th", {}, swatch(style), label), h("td", {}, this.value(middle)), h("td", {}, spread));
    });
    this.readout.replaceChildren(h("table", {}, h("caption", {}, this.curves.where()), h("tbody", {}, ...rows)));
    const width = this.readout.offsetWidth;
    this.readout.style.left = `${Math.max(0, x + 14 + width > this.width ? x - 14 - width : x + 14)}px`;
  }

  /** The values of each algorithm at a value of the horizontal axis. */
  values(at) {
    const there = this.shown.filter(({ xs }) => xs.length && at >= xs[0] && at <= xs.at(-1));
    return there.map(({ style, label, xs, low, middle, high, seeds }) => {
      const i = last(xs, at);
      return { style, label, seeds, low: low[i], middle: middle[i], high: high[i] };
    });
  }

  /** The read-out, for screen readers. */
  told() {
    const values = this.values(this.curves.at).map(({ label, middle }) => `${label} ${this.value(middle)}`);
    return `${this.curves.where()}: ${values.join(", ")}`;
  }

  select(from, to) {
    const { left, right } = this.frame;
    const [a, b] = from ? [from.x, to.x].sort(ascending).map((x) => clamp(x, left, right)) : [0, 0];
    this.selection.setAttribute("x", a);
    this.selection.setAttribute("width", b - a);
  }
}

/** Both charts, their legend and their switches. */
class Curves {
  axis = "round";
  log = true;
  part = null; // the part of the axis that is shown; null: all
  at = null; // where the cross-hair is
  hidden = new Set();
  bands = new Map();
  xs = []; // the places on the axis where a shown algorithm has a value

  constructor(experiment) {
    this.id = experiment.id;
    this.groups = [...new Set(experiment.runs.map((run) => run.algorithm))].map((label) => {
      const runs = experiment.runs.filter((run) => run.algorithm === label);
      return { label, style: runs[0].style, runs }; // the same as in pictures: folb.report.looks
    });
    const finite = (text) => (x) => (Number.isFinite(x) ? text(x) : Number.isNaN(x) ? "not measured" : "diverged");
    const target = 100 * experiment.about.target;
    const percent = finite((x) => decimals(x, 1));
    this.charts = [
      new Chart(this, { measure: "accuracy", title: "Test accuracy (%)", target, value: percent }),
      new Chart(this, { measure: "loss", title: "Training loss", log: true, value: finite((x) => digits(x, 4)) }),
    ];
    this.heard = h("p", { class: "heard", role: "status" });
    this.all = button("Show all", () => this.zoom(null));
    const seeds = `Lines are medians over ${experiment.seeds} seeds; bands show their range. `;
    const how = "Drag to zoom; double-click or Escape shows all. Arrow keys read values, + and − zoom.";
    this.node = h("div", { class: "curves" }, this.legend(), this.switches(),
      h("div", { class: "charts" }, ...this.charts.map((chart) => chart.node)),
      h("p", { class: "hint" }, (experiment.seeds > 1 ? seeds : "") + how), this.heard);
    onResize(this.charts[0].node, () => this.charts[0].width, () => this.draw());
  }

  legend() {
    const buttons = this.groups.map((group) => {
      const node = button(swatch(group.style), () => {
        if (!this.hidden.delete(group)) this.hidden.add(group);
        node.setAttribute("aria-pressed", !this.hidden.has(group));
        this.draw();
      });
      return fill(node, { "aria-pressed": "true" }, [group.label]);
    });
    return h("div", { class: "legend", role: "group", "aria-label": "Algorithms shown" }, ...buttons);
  }

  switches() {
    const axes = choice("Horizontal axis", `axis-${this.id}`, AXES, (axis) => {
      Object.assign(this, { axis, part: null, at: null });
      this.draw();
    });
    const log = h("input", { type: "checkbox", checked: true });
    log.addEventListener("change", () => {
      this.log = log.checked;
      this.draw();
    });
    return h("div", { class: "controls" }, axes, h("label", {}, log, "Logarithmic loss"), this.all);
  }

  shown() {
    return this.groups.filter((group) => !this.hidden.has(group));
  }

  band(group, measure) {
    const key = `${group.label}\n${this.axis}\n${measure}`;
    if (!this.bands.has(key)) this.bands.set(key, band(group.runs, this.axis, measure));
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
    const end = this.end();
    if (part) {
      const length = clamp(part[1] - part[0], end / 1e4, end);
      const from = clamp(part[0], 0, end - length);
      part = length > 0.999 * end ? null : [from, from + length];
    }
    this.part = part;
    this.draw();
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

  /** Draw again; read the data again if they have changed. */
  draw(changed = false) {
    if (changed) this.bands.clear();
    this.xs = [...new Set(this.shown().flatMap((group) => this.band(group, "accuracy").xs))].sort(ascending);
    this.all.disabled = !this.part;
    for (const chart of this.charts) chart.draw();
  }
}
