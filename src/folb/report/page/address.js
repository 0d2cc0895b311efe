// What is shown, in the part of the address after "#": a copied link shows the same.

const PAUSE = 400; // milliseconds between two writes: browsers refuse too many

/**
 * The address of this page. A part of the page has `pairs`, which gives pairs of keys and values, and `follow`, which
 * gets values by key, uses what fits and returns what does not. A prefix distinguishes keys of the same name.
 */
class Address {
  parts = [];
  timer = null;

  constructor() {
    this.notice = h("p", { class: "misfit", role: "status", hidden: true });
    addEventListener("hashchange", () => {
      if (this.fields().size || location.hash.length < 2) this.read();
      else this.write(); // a link within the page: what is shown stays in the address
    });
  }

  add(prefix, part) {
    this.parts.push({ prefix, part });
  }

  get anchor() {
    const first = location.hash.slice(1).split("&")[0];
    return first.includes("=") ? "" : first;
  }

  /** Values by key. */
  fields() {
    const pairs = new Map();
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      if (key !== this.anchor) pairs.set(key, [...(pairs.get(key) ?? []), value]);
    }
    return pairs;
  }

  /** Show what the address asks for, as far as it fits, and name what does not fit. */
  read() {
    const left = this.fields();
    const wrong = [];
    for (const { prefix, part } of this.parts) {
      const own = new Map();
      for (const key of part.keys) {
        if (left.has(prefix + key)) own.set(key, left.get(prefix + key));
        left.delete(prefix + key);
      }
      // a part in its first state is only drawn again if the address has something for it
      if (own.size || part.pairs().length) wrong.push(...part.follow(own).map((text) => prefix + text));
    }
    const place = this.anchor && document.getElementById(this.anchor);
    if (this.anchor && !place) wrong.push(this.anchor);
    for (const [key, values] of left) wrong.push(...values.map((value) => `${key}=${value}`));
    this.notice.hidden = !wrong.length;
    const shown = wrong.slice(0, 10).map((text) => (text.length > 80 ? `${text.slice(0, 80)}…` : text));
    const more = wrong.length > 10 ? `, and ${whole(wrong.length - 10)} more` : "";
    const why = "This link asks for things that this page does not have. The rest is shown.";
    this.notice.textContent = `${why} Left out: ${shown.join(", ")}${more}.`;
    if (place) place.scrollIntoView();
  }

  /** Note what is shown now, soon. */
  write() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      const query = new URLSearchParams();
      for (const { prefix, part } of this.parts) {
        for (const [key, value] of part.pairs()) query.append(prefix + key, value);
      }
      const text = [this.anchor, query.toString()].filter((piece) => piece).join("&");
      if (text === location.hash.slice(1)) return;
      history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    }, PAUSE);
  }
}

const address = new Address();
