// The data: a run's rounds, when it reaches a target, what its devices did, and the band of several runs.

const LOST = 1; // bits of the flags of folb.report.payload
const REJECTED = 2;
const TIMES = 4;
const HELD = 5; // as in folb.results.run: a target is held if the mean of so many evaluations is at least the target

/**
 * One algorithm with one seed; `x`, `judged` and the `curves` have a value for each evaluated round. The first of
 * `measures` is what it is judged by, and a target is for.
 */
class Run {
  constructor({ algorithm, seed, style }, directory, measures) {
    Object.assign(this, { algorithm, seed, style, directory, measures, by: measures[0] });
    this.clear();
  }

  get title() {
    return `${this.algorithm}, seed ${this.seed}`;
  }

  clear() {
    this.rounds = [];
    this.x = { round: [], mb: [], seconds: [] };
    this.judged = []; // in single precision, as the simulator has it
    this.curves = { loss: [] }; // as people read them: accuracies in per cent
    for (const { name } of this.measures) this.curves[name] = [];
    this.bytes = 0;
    this.up = 0; // of these bytes
    this.seconds = 0;
    this.trouble = []; // what went wrong on real devices: a round and words
    this.packed = []; // records
    this.records = null; // unpacked on first use
  }

  append({ rounds, bytes, up, seconds, evaluated, judged, metrics = {}, loss, records, trouble = [] }) {
    this.trouble.push(...trouble);
    let next = 0;
    rounds.forEach((round, i) => {
      this.rounds.push(round);
      this.bytes += bytes[i];
      this.up += up[i];
      this.seconds += Math.fround(seconds[i]);
      if (evaluated[next] !== i) return;
      this.x.round.push(round);
      this.x.mb.push(this.bytes / 1e6);
      this.x.seconds.push(this.seconds);
      this.judged.push(single(judged[next], this.by.lower));
      this.curves.loss.push(single(loss[next], true));
      for (const { name, factor, lower } of this.measures) {
        const own = name === this.by.name ? this.judged.at(-1) : single(metrics[name]?.[next], lower);
        this.curves[name].push(factor * own);
      }
      next++;
    });
    if (records) this.packed.push(records);
  }

  unpacked() {
    this.records ??= new Records();
    return this.records.take(this.packed);
  }

  /** When the run reaches the target, and from which round it holds it; null where it never does. */
  arrival(target) {
    const aim = Math.fround(target);
    const reaches = (value) => (this.by.lower ? value <= aim : value >= aim);
    const i = this.judged.findIndex(reaches);
    const mean = (at) => Math.fround(this.judged.slice(at, at + HELD).reduce((sum, value) => sum + value, 0) / HELD);
    const held = this.judged.findIndex((_, at) => at + HELD <= this.judged.length && reaches(mean(at)));
    const there = (values, at) => (at < 0 ? null : values[at]);
    return {
      rounds: there(this.x.round, i),
      held: there(this.x.round, held),
      mb: there(this.x.mb, i),
      seconds: there(this.x.seconds, i),
    };
  }
}

/** A measured value in single precision; one that diverged is worse than any other, one that is missing is NaN. */
function single(value, lower) {
  if (value === undefined || value === "unmeasured") return NaN;
  return value === null ? (lower ? Infinity : -Infinity) : Math.fround(value);
}

/**
 * Over the seeds of an algorithm, the least, median and greatest value at every x where a seed was evaluated.
 * A seed keeps its value until its next evaluation. The band ends where the first seed ends. If there are very many
 * places, as by seconds, it has only some.
 */
function band(runs, axis, measure) {
  const begun = runs.filter((run) => run.rounds.length && run.x[axis].length && run.curves[measure]);
  const curve = { xs: [], low: [], middle: [], high: [], seeds: begun.length };
  if (!begun.length) return curve;
  const from = Math.max(...begun.map((run) => run.x[axis][0]));
  const to = Math.min(...begun.map((run) => run.x[axis].at(-1)));
  const all = [...new Set(begun.flatMap((run) => run.x[axis]))].filter((x) => x >= from && x <= to).sort(ascending);
  // seeds may share no place: of all places, keep about as many as one seed has, counted from the end
  const every = Math.floor(all.length / Math.max(...begun.map((run) => run.x[axis].length))) || 1;
  curve.xs = all.filter((_, i) => (all.length - 1 - i) % every === 0);
  const at = begun.map(() => 0);
  const half = (begun.length - 1) / 2;
  for (const x of curve.xs) {
    const values = begun.map((run, i) => {
      while (run.x[axis][at[i] + 1] <= x) at[i]++;
      return run.curves[measure][at[i]];
    });
    values.sort(ascending);
    curve.low.push(values[0]);
    curve.middle.push((values[Math.floor(half)] + values[Math.ceil(half)]) / 2);
    curve.high.push(values.at(-1));
  }
  return curve;
}

/** The records of devices in each round of a run, in flat arrays; row t begins at start[t]. */
class Records {
  constructor() {
    this.taken = 0;
    this.start = [0];
    this.devices = new Uint32Array(0);
    this.weights = new Float32Array(0);
    this.gamma = new Float32Array(0);
    this.own = new Float32Array(0);
    this.flags = new Uint8Array(0);
  }

  get size() {
    return this.start.at(-1);
  }

  /** Unpack the new pieces. */
  take(pieces) {
    for (; this.taken < pieces.length; this.taken++) {
      const piece = pieces[this.taken];
      const size = this.size;
      for (const count of unpack(piece.counts, Uint32Array)) this.start.push(this.size + count);
      for (const name of ["devices", "weights", "gamma", "own", "flags"]) {
        const Kind = this[name].constructor;
        if (this.size > this[name].length) {
          const larger = new Kind(Math.max(this.size, 2 * size)); // twice, so that many small pieces stay cheap
          larger.set(this[name].subarray(0, size));
          this[name] = larger;
        }
        if (piece[name] === undefined) this[name].fill(NaN, size); // the own figures were not recorded
        else this[name].set(unpack(piece[name], Kind), size);
      }
    }
    return this;
  }

  /** For each device that was chosen: its number, and how often it was chosen, lost, rejected and negated. */
  counts() {
    const rows = new Map();
    for (let e = 0; e < this.size; e++) {
      const device = this.devices[e];
      let row = rows.get(device);
      if (!row) rows.set(device, (row = [device, 0, 0, 0, 0]));
      row[1]++;
      if (this.flags[e] & LOST) row[2]++;
      if (this.flags[e] & REJECTED) row[3]++;
      if (this.weights[e] < 0) row[4]++;
    }
    return [...rows.values()].sort((a, b) => a[0] - b[0]);
  }

  /** What one device did, in the rounds in which it was chosen: the row, its weight, gamma and flags. */
  of(device) {
    const rounds = [];
    for (let t = 0; t + 1 < this.start.length; t++) {
      for (let e = this.start[t]; e < this.start[t + 1]; e++) {
        if (this.devices[e] !== device) continue;
        rounds.push({ t, weight: this.weights[e], gamma: this.gamma[e], own: this.own[e], flags: this.flags[e] });
      }
    }
    return rounds;
  }

  /** The size that 99 % of the values stay within; the colours of a scale end there. */
  extent(values) {
    const sizes = [];
    const every = Math.ceil(this.size / 50000) || 1;
    for (let e = 0; e < this.size; e += every) if (values[e]) sizes.push(Math.abs(values[e]));
    sizes.sort(ascending);
    return sizes[Math.floor(0.99 * (sizes.length - 1))] || 1;
  }
}

function unpack(text, Kind) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Kind(bytes.buffer);
}
