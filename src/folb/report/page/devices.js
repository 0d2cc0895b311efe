// What the devices did: a heat map of device by round, and counts.

const MEASURES = { weights: "Aggregation weight", gamma: "Gamma" };
const FEW = 10; // devices in the table by default
const SHADES = 511; // an odd number, so that zero has a colour of its own
const FAINT = 0.15; // the least distance of a weight from zero's colour, so that its sign is visible

/** Colours of the stylesheet, as [r, g, b]. */
function colours(node, ...names) {
  return names.map((name) => {
    node.style.color = `var(--${name})`;
    const channels = getComputedStyle(node).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    node.style.color = "";
    return channels;
  });
}

const pixel = ([r, g, b]) => ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;

/** The colour at a part, 0 to 1, of the way along a few colours. */
function between(stops, part) {
  const at = part * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((from, channel) => from + (stops[i + 1][channel] - from) * (at - i));
}

/** Device by round in a canvas, in one pass over all records. Only devices that were ever chosen have a line. */
class HeatMap {
  measure = "weights";
  part = null; // the rows and lines shown, as [from, end, from, end]; null: all
  cell = null; // the [row, line] read out
  known = []; // the devices, each with a line
  lineOf = new Map();

  constructor(pick, measures, own) {
    Object.assign(this, { measures, own });
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map" });
    this.box = h("div", { class: "box", hidden: true });
    this.readout = h("p", { class: "value", role: "status" });
    this.key = h("div", { class: "key" });
    this.all = button("Show all", () => this.show(null));
    this.caption = h("figcaption");
    const plot = h("div", { class: "plot heat" }, this.canvas, this.box);
    this.node = h("figure", {}, this.caption, plot, this.readout, this.key);
    interact(this.canvas, {
      place: (event) => position(event, this.canvas, this.width),
      hover: (point) => this.point(point && this.under(point)),
      drag: (from, to) => this.select(from, to),
      zoom: (from, to) => this.show(this.around(this.under(from), this.under(to))),
      pick: (point) => pick(this.known[this.under(point)[1]]),
      keys: {
        Enter: () => this.cell && pick(this.known[this.cell[1]]),
        ArrowLeft: (step) => this.step(-step, 0),
        ArrowRight: (step) => this.step(step, 0),
        ArrowUp: (step) => this.step(0, -step),
        ArrowDown: (step) => this.step(0, step),
        Home: () => this.step(-Infinity, 0),
        End: () => this.step(Infinity, 0),
        "+": () => this.magnify(0.5),
        "-": () => this.magnify(2),
        Escape: () => this.show(null),
      },
    });
    onResize(this.node, () => this.width, () => this.draw());
  }

  get count() {
    return Math.max(1, this.known.length);
  }

  set(run, known) {
    if (run !== this.run) this.part = this.cell = null;
    this.run = run;
    this.records = run.unpacked();
    this.known = known;
    this.lineOf = new Map(known.map((device, line) => [device, line]));
    this.ends = {};
    this.draw();
  }

  extent() {
    return this.part ?? [0, Math.max(1, this.run.rounds.length), 0, this.count];
  }

  draw() {
    const { canvas, records } = this;
    this.width = this.node.clientWidth;
    if (!this.width || !records) return;
    const [t0, t1, d0, d1] = this.extent();
    const height = clamp((d1 - d0) * 15, 120, 420) + 50;
    const frame = (this.frame = { left: 50, right: this.width - 18, top: 8, bottom: height - 42 });
    this.ratio = Math.max(2, devicePixelRatio); // sharp on paper, too
    this.size = [(frame.right - frame.left) / (t1 - t0), (frame.bottom - frame.top) / (d1 - d0)]; // of a cell
    this.columns = Math.round((frame.right - frame.left) * this.ratio);
    this.lines = Math.round((frame.bottom - frame.top) * this.ratio);
    canvas.width = this.width * this.ratio;
    canvas.height = height * this.ratio;
    const end = (this.ends[this.measure] ??= records.extent(records[this.measure]));
    const palette = this.palette();
    const context = canvas.getContext("2d");
    this.settle();
    context.putImageData(this.paint(palette, end), frame.left * this.ratio, frame.top * this.ratio);
    context.scale(this.ratio, this.ratio);
    this.axes(context);
    if (Math.min(...this.size) > 4.5) this.marks(context);
    this.legend(palette, end);
    this.all.disabled = !this.part;
    this.caption.textContent = `${this.measures[this.measure]} by device and round: ${this.run.title}`;
    const how = "Arrow keys move from cell to cell, Enter shows its device, plus and minus zoom, Escape shows all.";
    canvas.setAttribute("aria-label", `${this.caption.textContent}. ${how} Counts are in the table below.`);
    this.point(this.cell);
  }

  /** Find the record to show at each pixel: of several, a rejected device, else the largest value. */
  settle() {
    const { records, columns, lines } = this;
    const { devices, flags } = records;
    const values = records[this.measure];
    const [t0, t1, d0, d1] = this.extent();
    const shown = (this.shown = new Int32Array(columns * lines).fill(-1));
    const strength = (e) => (flags[e] & REJECTED ? Infinity : Math.abs(values[e]) || 0);
    for (let t = t0; t < t1; t++) {
      const left = Math.floor(((t - t0) * columns) / (t1 - t0));
      const right = Math.max(left + 1, Math.floor(((t + 1 - t0) * columns) / (t1 - t0)));
      for (let e = records.start[t]; e < records.start[t + 1]; e++) {
        const d = this.lineOf.get(devices[e]);
        if (d < d0 || d >= d1) continue;
        const top = Math.floor(((d - d0) * lines) / (d1 - d0));
        const bottom = Math.max(top + 1, Math.floor(((d + 1 - d0) * lines) / (d1 - d0)));
        for (let y = top; y < bottom; y++) {
          for (let p = y * columns + left; p < y * columns + right; p++) {
            if (shown[p] < 0 || strength(e) > strength(shown[p])) shown[p] = e;
          }
        }
      }
    }
  }

  paint({ signed, shades, none, lost, rejected }, end) {
    const { flags, [this.measure]: values } = this.records;
    const image = new ImageData(this.columns, this.lines);
    const pixels = new Uint32Array(image.data.buffer);
    const half = (SHADES - 1) / 2;
    this.shown.forEach((e, p) => {
      if (e < 0) pixels[p] = none;
      else if (flags[e] & REJECTED) pixels[p] = rejected;
      else if (flags[e] & LOST) pixels[p] = lost;
      else if (Number.isNaN(values[e])) pixels[p] = none;
      else {
        const at = signed ? half + (half * values[e]) / end : (2 * half * values[e]) / end;
        pixels[p] = shades[clamp(values[e] < 0 ? Math.floor(at) : Math.ceil(at), 0, SHADES - 1)];
      }
    });
    return image;
  }

  palette() {
    const signed = this.measure === "weights";
    const weights = ["negative", "negative-half", "zero", "positive-half", "positive"];
    const stops = colours(this.node, ...(signed ? weights : ["low", "middle", "high"]));
    const bent = (x) => (x && Math.sign(x) * (FAINT + (1 - FAINT) * Math.sqrt(Math.abs(x))) + 1) / 2 || 0.5;
    const shades = Uint32Array.from({ length: SHADES }, (_, i) => {
      const part = i / (SHADES - 1);
      return pixel(between(stops, signed ? bent(2 * part - 1) : part));
    });
    const [none, lost, rejected] = colours(this.node, "none", "lost", "rejected").map(pixel);
    return { signed, shades, none, lost, rejected };
  }

  axes(context) {
    const { left, right, top, bottom } = this.frame;
    const [t0, t1, d0, d1] = this.extent();
    const [ink, line] = colours(this.node, "soft", "line").map((rgb) => `rgb(${rgb})`);
    const first = this.run.rounds[t0] ?? 1;
    context.font = `11px ${getComputedStyle(this.node).fontFamily}`;
    context.fillStyle = ink;
    context.strokeStyle = line;
    context.strokeRect(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1);
    const marked = (from, count, n) => ticks(from, from + Math.max(1, count - 1), n).filter(
      ({ value }) => Number.isInteger(value) && value < from + count);
    context.textAlign = "center";
    for (const { value, text } of marked(first, t1 - t0, (right - left) / 90)) {
      context.fillText(text, left + (value - first + 0.5) * this.size[0], bottom + 16);
    }
    context.fillText("Rounds", (left + right) / 2, bottom + 35);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const { value, text } of marked(d0, d1 - d0, (bottom - top) / 40)) {
      const name = this.known.length === this.known.at(-1) + 1 ? text : whole(this.known[value] ?? 0);
      context.fillText(name, left - 7, top + (value - d0 + 0.5) * this.size[1]);
    }
    context.save();
    context.translate(9, (top + bottom) / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText("Device", 0, 0);
    context.restore();
  }

  /** Where there is room: a cross for lost, a square for rejected, a dash for negated. */
  marks(context) {
    const { start, devices, flags, weights } = this.records;
    const [t0, t1, d0, d1] = this.extent();
    const [w, v] = this.size;
    const r = 0.34 * Math.min(w, v, 12);
    context.strokeStyle = `rgb(${colours(this.node, "mark")[0]})`;
    context.beginPath();
    for (let t = t0; t < t1; t++) {
      for (let e = start[t]; e < start[t + 1]; e++) {
        const d = this.lineOf.get(devices[e]);
        if (d < d0 || d >= d1) continue;
        const x = this.frame.left + (t - t0 + 0.5) * w;
        const y = this.frame.top + (d - d0 + 0.5) * v;
        const stroke = (dy) => {
          context.moveTo(x - r, y - dy);
          context.lineTo(x + r, y + dy);
        };
        if (flags[e] & REJECTED) context.rect(x - r, y - r, 2 * r, 2 * r);
        else if (flags[e] & LOST) [r, -r].forEach(stroke);
        else if (weights[e] < 0) stroke(0);
      }
    }
    context.stroke();
  }

  legend({ signed, shades }, end) {
    const bar = h("canvas", { width: SHADES, height: 1, class: "ramp", "aria-hidden": "true" });
    const image = new ImageData(SHADES, 1);
    new Uint32Array(image.data.buffer).set(shades);
    bar.getContext("2d").putImageData(image, 0, 0);
    const own = this.measure === "own" ? ["0", digits(this.own.factor * end, 3)] : ["0, exact", digits(end, 2)];
    const ends = signed ? [`−${digits(end, 2)}, negated`, `${digits(end, 2)}`] : own;
    const patch = (name, text) => h("span", {}, h("i", { class: `patch ${name}`, "aria-hidden": "true" }), text);
    const patches = [patch("lost", "lost"), patch("rejected", "rejected"), patch("none", "not chosen")];
    this.key.replaceChildren(h("span", {}, ends[0], bar, ends[1]), ...patches);
    if (Math.min(...this.size) * this.ratio < 1) {
      const crowded = "Several cells share a pixel: it shows a rejected device, else the largest value.";
      this.key.append(h("span", { class: "hint" }, `${crowded} Zoom in to see each.`));
    }
  }

  /** The cell at a point: the shown cell, or a cell without a record. */
  under({ x, y }) {
    const { frame, ratio, columns, lines, records } = this;
    const [t0, t1, d0, d1] = this.extent();
    const column = clamp(Math.floor((x - frame.left) * ratio), 0, columns - 1);
    const line = clamp(Math.floor((y - frame.top) * ratio), 0, lines - 1);
    const e = this.shown[line * columns + column];
    if (e >= 0) return [last(records.start, e), this.lineOf.get(records.devices[e])];
    return [t0 + Math.floor((column * (t1 - t0)) / columns), d0 + Math.floor((line * (d1 - d0)) / lines)];
  }

  /** Read out a cell. */
  point(cell) {
    const [t0, t1, d0, d1] = this.extent();
    const inside = cell && cell[0] >= t0 && cell[0] < t1 && cell[1] >= d0 && cell[1] < d1;
    this.cell = cell;
    this.box.hidden = !inside;
    this.readout.textContent = inside ? this.reading(...cell) : "";
    if (!inside) return;
    const [w, v] = this.size;
    this.place(this.frame.left + (cell[0] - t0) * w, this.frame.top + (cell[1] - d0) * v, w, v);
  }

  place(left, top, width, height) {
    Object.assign(this.box.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
  }

  reading(t, line) {
    const device = this.known[line];
    const { start, devices, weights, gamma, own, flags } = this.records;
    const where = `Round ${whole(this.run.rounds[t] ?? 0)}, device ${device}:`;
    for (let e = start[t]; e < start[t + 1]; e++) {
      if (devices[e] !== device) continue;
      const words = [];
      if (flags[e] & LOST) words.push("lost");
      if (flags[e] & REJECTED) words.push("rejected");
      if (!Number.isNaN(weights[e])) words.push(`weight ${digits(weights[e], 3)}${weights[e] < 0 ? ", negated" : ""}`);
      if (!Number.isNaN(gamma[e])) words.push(`gamma ${digits(gamma[e], 3)}`);
      if (this.own && !Number.isNaN(own[e])) {
        words.push(`${this.own.name.toLowerCase()} ${digits(this.own.factor * own[e], 3)}`);
      }
      if (flags[e] >= 2 * TIMES) words.push(`drawn ${Math.floor(flags[e] / TIMES)} times`);
      return `${where} ${words.join(", ") || "chosen"}.`;
    }
    return `${where} not chosen.`;
  }

  select(from, to) {
    this.box.hidden = !from;
    if (!from) return;
    const [left, right] = [from.x, to.x].sort(ascending);
    const [top, bottom] = [from.y, to.y].sort(ascending);
    this.place(left, top, right - left, bottom - top);
  }

  /** The part with two cells in its corners. */
  around([t, d], [u, c]) {
    return [Math.min(t, u), Math.max(t, u) + 1, Math.min(d, c), Math.max(d, c) + 1];
  }

  show(part) {
    const all = part && part[1] - part[0] >= this.run.rounds.length && part[3] - part[2] >= this.count;
    this.part = all ? null : part;
    this.draw();
  }

  centre() {
    const [t0, t1, d0, d1] = this.extent();
    return this.cell ?? [(t0 + t1) >> 1, (d0 + d1) >> 1];
  }

  step(rows, devices) {
    const [t0, t1, d0, d1] = this.extent();
    const [t, d] = this.centre();
    this.point([clamp(t + rows, t0, t1 - 1), clamp(d + devices, d0, d1 - 1)]);
  }

  magnify(factor) {
    const [t0, t1, d0, d1] = this.extent();
    const [t, d] = this.centre();
    const span = (centre, length, all) => {
      const wanted = clamp(Math.round(length * factor), Math.min(8, all), all);
      const from = clamp(Math.round(centre - wanted / 2), 0, all - wanted);
      return [from, from + wanted];
    };
    this.show([...span(t, t1 - t0, this.run.rounds.length), ...span(d, d1 - d0, this.count)]);
  }
}

/** The heat map of a chosen run, how often each device was chosen, lost, rejected and negated, and a device alone. */
class Devices {
  keys = ["run", "device"];
  sorted = 1; // by this column
  rows = FEW;
  device = null; // the one that is shown alone

  constructor(experiment) {
    this.experiment = experiment;
    const { own } = experiment.about;
    const measures = { ...MEASURES, ...(own ? { own: own.name } : {}) };
    this.map = new HeatMap((device) => this.pick(device), measures, own);
    const runs = experiment.recorded().map((i) => h("option", { value: i }, experiment.runs[i].title));
    this.select = h("select", { onchange: () => this.choose(Number(this.select.value)) }, ...runs);
    const measure = choice("Colour", `measure-${experiment.id}`, measures, (name) => {
      this.map.measure = name;
      this.map.draw();
    });
    const headings = ["device", "chosen", "lost", "rejected", "negated"].map((text, i) => {
      return h("th", { scope: "col" }, button(text, () => this.sort(i)));
    });
    this.head = h("tr", {}, ...headings);
    this.body = h("tbody");
    this.more = button("", () => this.extend());
    this.caption = h("caption");
    this.alone = h("div", { class: "alone" });
    const table = h("table", { class: "counts" }, this.caption, h("thead", {}, this.head), this.body);
    this.node = h("div", {},
      h("div", { class: "controls" }, h("label", {}, "Run ", this.select), measure, this.map.all),
      this.map.node, h("p", { class: "hint" }, "Click a cell, or a number below, to see a device alone."), this.alone,
      scrolling("Counts for each device", table), this.more);
  }

  draw() {
    this.run = this.experiment.runs[Number(this.select.value)];
    this.counts = this.run.unpacked().counts();
    this.map.set(this.run, this.counts.map(([device]) => device));
    this.tabulate();
    this.single();
  }

  choose(i) {
    this.select.value = i;
    this.experiment.choose(i);
    address.write();
  }

  /** Show one device alone; null: none. */
  pick(device) {
    this.device = device ?? null;
    this.single();
    address.write();
  }

  single() {
    const shown = this.device !== null && this.counts.some(([device]) => device === this.device);
    const panel = shown && devicePanel(this.run, this.device, this.experiment.about, () => this.pick(null));
    const never = h("p", { class: "hint" }, `Device ${this.device} was not chosen in this run.`);
    const held = this.alone.contains(document.activeElement);
    this.alone.replaceChildren(panel || (this.device === null ? "" : never));
    if (held) this.alone.querySelector("button")?.focus();
  }

  /** What differs from the first state, for the address. */
  pairs() {
    const pairs = [];
    if (this.select.selectedIndex > 0) pairs.push(["run", this.run.title]);
    if (this.device !== null) pairs.push(["device", this.device]);
    return pairs;
  }

  /** Show what an address asks for; what does not fit is returned. */
  follow(fields) {
    const wrong = [];
    const [title, number] = ["run", "device"].map((key) => fields.get(key)?.at(-1));
    const options = [...this.select.options];
    const option = title === undefined ? options[0] : options.find(({ textContent }) => textContent === title);
    if (!option) wrong.push(`run=${title}`);
    const known = /^\d{1,9}$/.test(number ?? "") && Number(number) < this.experiment.about.devices;
    const device = known ? Number(number) : null;
    if (number !== undefined && device === null) wrong.push(`device=${number}`);
    this.device = device;
    const chosen = (option ?? options[0]).value;
    const other = chosen !== this.select.value;
    this.select.value = chosen;
    if (other) this.experiment.choose(Number(chosen));
    else this.single();
    return wrong;
  }

  sort(column) {
    this.sorted = column;
    this.tabulate();
  }

  extend() {
    this.rows = this.rows === FEW ? Infinity : FEW;
    this.tabulate();
  }

  tabulate() {
    [...this.head.children].forEach((cell, i) => {
      if (i === this.sorted) cell.setAttribute("aria-sort", i ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    const order = (a, b) => (this.sorted ? b[this.sorted] - a[this.sorted] : 0) || a[0] - b[0];
    const most = this.counts.reduce((most, [, chosen]) => Math.max(most, chosen), 1);
    const rows = this.counts.toSorted(order).slice(0, this.rows).map(([device, chosen, ...rest]) => {
      const bar = h("i", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${(8 * chosen) / most}rem`;
      const others = rest.map((count) => h("td", {}, whole(count)));
      const open = fill(button(String(device), () => this.pick(device)), { class: "plain" }, []);
      return h("tr", {}, h("th", { scope: "row" }, open), h("td", {}, bar, whole(chosen)), ...others);
    });
    const at = this.body.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.body.replaceChildren(...rows);
    if (at) [...this.body.querySelectorAll("button")].find((node) => node.textContent === at)?.focus();
    const { devices } = this.experiment.about;
    const never = devices - this.counts.length;
    const absent = `. ${whole(never)} of ${whole(devices)} were never chosen, and are not shown`;
    const what = "Rounds in which each device was chosen, and what happened to it";
    this.caption.textContent = what + (never > 0 ? absent : "");
    this.more.hidden = this.counts.length <= FEW;
    const all = `Show all ${whole(this.counts.length)} devices`;
    this.more.textContent = this.rows === FEW ? all : `Show the first ${FEW}`;
  }
}
