// The table of results. For the run's own target its text comes from folb; for others it is made here in the same way.

/** A number as Python's "g" and ".nf" write it: six digits; n decimals, and halves to the even neighbour. */
function general(x) {
  const short = Number(x.toPrecision(6));
  if (Math.abs(short) < 1e6) return String(short);
  const [digits, power] = short.toExponential().split("e+");
  return `${digits}e+${power.padStart(2, "0")}`;
}

function fixed(x, n) {
  const scaled = x * 10 ** n;
  const tie = Number.isInteger(x * 2 ** (n + 1)) && scaled % 1 === 0.5;
  return (tie && Math.floor(scaled) % 2 === 0 ? Math.floor(scaled) / 10 ** n : x).toFixed(n);
}

/** The median; null, a seed that never arrives, is later than any that does. */
function medianOf(reached) {
  const sorted = reached.map((value) => value ?? Infinity).sort(ascending);
  const half = (sorted.length - 1) / 2;
  return (sorted[Math.floor(half)] + sorted[Math.ceil(half)]) / 2;
}

/** As `folb.results.summary.arrival`: the median, and how many never arrive. */
function arrived(reached, form = general) {
  const middle = medianOf(reached);
  const missed = reached.filter((value) => value === null).length;
  if (middle === Infinity) return "never";
  return form(middle) + (missed ? ` (${missed} of ${reached.length} never)` : "");
}

/** As `folb.results.summary.ranged`: the median, and the range. */
function ranged(reached) {
  if (new Set(reached).size === 1) return arrived(reached);
  const word = (value) => (value === Infinity ? "never" : general(value));
  const ends = reached.map((value) => value ?? Infinity).sort(ascending);
  return `${word(medianOf(reached))} (${word(ends[0])} to ${word(ends.at(-1))})`;
}

// the columns that move with the target, by the beginning of their headings
const MOVING = {
  "rounds to ": (arrivals) => ranged(arrivals.map(({ rounds }) => rounds)),
  "held from": (arrivals) => ranged(arrivals.map(({ held }) => held)),
  "MB to ": (arrivals) => arrived(arrivals.map(({ mb }) => mb), (x) => fixed(x, 2)),
  "s to ": (arrivals) => arrived(arrivals.map(({ seconds }) => seconds), (x) => fixed(x, 0)),
};

/** A stored table at another target of the measure `by`. `arms` have labels, as rows do, and runs. */
function moved({ headings, rows }, arms, target, by) {
  const columns = headings.map((text) => Object.keys(MOVING).find((start) => text.startsWith(start)));
  const named = (start) => `${start}${goal(target, by)}`;
  const head = headings.map((text, i) => (columns[i]?.endsWith(" to ") ? named(columns[i]) : text));
  const body = rows.map((row) => {
    const own = arms.find((arm) => arm.label === row[0])?.runs.filter((run) => run.judged.length) ?? [];
    const arrivals = own.map((run) => run.arrival(target));
    return row.map((text, i) => (columns[i] && arrivals.length ? MOVING[columns[i]](arrivals) : text));
  });
  return { headings: head, rows: body };
}

/** A target as people read it, without and with its unit. */
const aimed = (target, by) => general((by.unit === "%" ? 100 : 1) * target);
const goal = (target, by) => aimed(target, by) + (by.unit === "%" ? " %" : "");

const heldFrom = ({ lower }) => {
  const how = lower ? "at most" : "at least";
  return ` Held from: the first round from which five evaluations in a row have a mean of ${how} the target.`;
};

/** The table at the target of the curves, and a file with the numbers of each seed. */
class Results {
  constructor(label) {
    this.table = scrolling(label);
    const file = button("csv", () => {
      const { name, arms, target } = this.curves;
      save(`${name}-results.csv`, csv(resultsRows(arms, target)));
    });
    this.files = h("p", { class: "downloads" }, fill(file, { "aria-label": "Results of each seed as csv" }, []));
    this.node = h("div", {}, this.table, this.files);
  }

  /** `said` stands above the table. */
  show(table, curves, said) {
    this.curves = curves;
    this.files.hidden = !table.rows.length;
    if (!table.rows.length) return this.table.replaceChildren(h("p", {}, "No round has been evaluated yet."));
    const { arms, target, stored, by } = curves;
    const { headings, rows } = target === stored ? table : moved(table, arms, target, by);
    const cell = (text, i) => (i ? h("td", {}, text) : h("th", { scope: "row" }, text));
    this.table.replaceChildren(h("table", { class: "results" }, h("caption", {}, said),
      h("thead", {}, h("tr", {}, ...headings.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell))))));
  }
}

const milliseconds = (x) => Math.round(1000 * x) / 1000;

/** A row for each run, with the names that results.json has. */
function resultsRows(arms, target) {
  const names = ["run", "algorithm", "seed", "target", "rounds_to_target", "held_from", "bytes_to_target",
    "seconds_to_target", "final", "best", "bytes_up", "bytes_down"];
  const rows = arms.flatMap(({ label, runs }) => runs.filter((run) => run.judged.length).map((run) => {
    const { rounds, held, mb, seconds } = run.arrival(target);
    const late = seconds === null ? null : milliseconds(seconds);
    const bytes = mb === null ? null : Math.round(1e6 * mb);
    const better = run.by.lower ? Math.min : Math.max;
    const best = run.judged.every(Number.isFinite) ? run.judged.reduce((a, b) => better(a, b)) : NaN;
    return [run.directory, label, run.seed, target, rounds, held, bytes, late, run.judged.at(-1), best, run.up,
      run.bytes - run.up];
  }));
  return [names, ...rows];
}

/** A row for each evaluated round, with `measures`; what was not measured is empty. */
function curvesRows(arms, [by, ...others]) {
  const judged = by.name === "accuracy" ? "test_accuracy" : by.name;
  const more = others.map(({ name }) => name);
  const names = ["run", "algorithm", "seed", "round", judged, "train_loss", "bytes", "seconds", ...more];
  const known = (value) => (Number.isNaN(value) ? null : value);
  const rows = arms.flatMap(({ label, runs }) => runs.flatMap((run) => run.judged.map((value, i) => {
    const { round, mb, seconds } = run.x;
    const metrics = others.map(({ name, factor }) => known(Math.fround((run.curves[name]?.[i] ?? NaN) / factor)));
    return [run.directory, label, run.seed, round[i], known(value), known(run.curves.loss[i]),
      Math.round(1e6 * mb[i]), milliseconds(seconds[i]), ...metrics];
  })));
  return [names, ...rows];
}
