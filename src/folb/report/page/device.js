// One device: what it holds, and what it did in the rounds in which it was chosen.

const LISTED = 10; // the most of its rounds, the newest first

/** Its values of one measure as dots by round; nothing if there are none. */
function dots(title, points, end) {
  const known = points.filter(({ value }) => Number.isFinite(value));
  if (!known.length) return "";
  const width = clamp(document.documentElement.clientWidth - 80, 260, 520); // so that its text can be read
  const height = 150;
  const frame = { left: 50, right: width - 10, top: 8, bottom: height - 26 };
  const values = known.map(({ value }) => value);
  let [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [0, 0]);
  if (low === high) high = low + 1;
  const x = scale([0, Math.max(1, end)], [frame.left, frame.right]);
  const y = scale([low, high], [frame.bottom, frame.top]);
  const axes = s("g", { class: "axes" });
  for (const { value, text } of ticks(low, high, 3)) {
    axes.append(s("line", { x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }));
    axes.append(s("text", { class: "y", x: frame.left - 7, y: y(value) }, text));
  }
  for (const { value, text } of ticks(0, Math.max(1, end), 5)) {
    axes.append(s("text", { class: "x", x: x(value), y: frame.bottom + 17 }, text));
  }
  axes.append(s("line", { class: "base", x1: frame.left, x2: frame.right, y1: y(0), y2: y(0) }));
  const marks = known.map(({ round, value }) => {
    return s("circle", { class: value < 0 ? "negated" : "", cx: x(round), cy: y(value), r: 2.5 });
  });
  const ends = `${digits(values.at(-1), 3)} in round ${whole(known.at(-1).round)}`;
  const label = `${title} by round: ${whole(known.length)} values, the last ${ends}`;
  const attributes = { class: "chart dots", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label };
  return h("figure", {}, h("figcaption", {}, title), s("svg", attributes, axes, ...marks));
}

/** How many of its samples have each label, as bars; of many labels, those it has. */
function labelBars(counts) {
  const most = Math.max(1, ...counts);
  const own = counts.map((count, label) => ({ count, label })).filter(({ count }) => count);
  const rows = own.map(({ count, label }) => {
    const bar = h("i", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(8 * count) / most}rem`;
    return h("tr", {}, h("th", { scope: "row" }, String(label)), h("td", {}, bar, whole(count)));
  });
  const head = h("tr", {}, h("th", { scope: "col" }, "label"), h("th", { scope: "col" }, "samples"));
  const table = h("table", { class: "counts" }, h("thead", {}, head), h("tbody", {}, ...rows));
  return scrolling("Labels of the device", table);
}

/** Its samples and labels, or why they are not known. */
function holding(held, device) {
  const elsewhere = ["Samples and labels: they are in a page that ", h("code", {}, "folb report"), " writes."];
  if (!held) return [h("p", {}, ...elsewhere)];
  if (held.missing) return [h("p", {}, `Samples and labels: not known; ${held.missing}.`)];
  if (device >= held.train.length) return [h("p", {}, "Samples and labels: the data have no such device.")];
  const [train, test] = [held.train[device], held.test[device]];
  const said = `Samples: ${whole(train)} to train on, ${whole(test)} to test on.`;
  return [h("p", {}, said), held.labels ? labelBars(held.labels[device]) : ""];
}

/** The panel of one device in one run; `own` says what its own figure is, if that was recorded. */
function devicePanel(run, device, { holdings: held, own }, close) {
  const records = run.unpacked().of(device).filter(({ t }) => t < run.rounds.length);
  const at = records.map((record) => ({ ...record, round: run.rounds[record.t] }));
  const counted = (word, test) => `${word} ${whole(records.filter(test).length)}`;
  const did = ["chosen in " + whole(records.length) + ` of ${whole(run.rounds.length)} rounds`,
    counted("lost", ({ flags }) => flags & LOST), counted("rejected", ({ flags }) => flags & REJECTED),
    counted("negated", ({ weight }) => weight < 0)];
  const end = run.rounds.at(-1) ?? 1;
  const figure = own ? [[own.title, "own", own.factor]] : [];
  const measures = [...figure, ["Aggregation weight", "weight", 1], ["Gamma", "gamma", 1]];
  const charts = measures.map(([title, key, factor]) => {
    return dots(title, at.map((record) => ({ round: record.round, value: factor * record[key] })), end);
  });
  const number = (value) => (Number.isNaN(value) ? "" : digits(value, 3));
  const rows = at.toReversed().slice(0, LISTED).map(({ round, weight, gamma, own: value, flags }) => {
    const fate = [flags & LOST ? "lost" : "", flags & REJECTED ? "rejected" : "", weight < 0 ? "negated" : ""];
    return h("tr", {}, h("th", { scope: "row" }, whole(round)), h("td", {}, number(weight)), h("td", {}, number(gamma)),
      own ? h("td", {}, number(own.factor * value)) : "", h("td", {}, fate.filter((word) => word).join(", ")));
  });
  const names = ["round", "weight", "gamma", ...(own ? [own.name.toLowerCase()] : []), ""];
  const head = names.map((text) => h("th", { scope: "col" }, text));
  const said = at.length > LISTED ? `Its last ${LISTED} of ${whole(at.length)} rounds` : "Its rounds";
  const table = h("table", { class: "counts" }, h("caption", {}, said), h("thead", {}, h("tr", {}, ...head)),
    h("tbody", {}, ...rows));
  return h("section", { class: "device", "aria-label": `Device ${device}` },
    h("p", { class: "name" }, h("strong", {}, `Device ${device}, ${run.title}`), button("Close", close)),
    h("p", {}, `${did.join(", ")}.`),
    h("div", { class: "charts" },
      h("div", {}, ...holding(held, device), at.length ? scrolling("Rounds of the device", table) : ""),
      h("div", {}, ...charts)),
    h("p", { class: "hint" }, ...ownWords(own, at)));
}

/** What a reader should know of its own figure. */
function ownWords(own, records) {
  if (!own) {
    const how = [h("code", {}, "--metrics fairness"), " with ", h("code", {}, "--records"), " for that."];
    return ["Its own accuracy over the rounds was not recorded: use ", ...how];
  }
  if (!records.some((record) => Number.isFinite(record.own))) return ["It has no own figure: it has no test samples."];
  return ["Its own figure is that of the server's model on its test samples, after rounds in which it was chosen."];
}
