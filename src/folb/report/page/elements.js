// Elements, numbers and scales. Text is only added as text nodes; nothing on this page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const button = (text, onclick) => h("button", { type: "button", onclick }, text);

/** A number with n significant digits, and a number with n decimals. */
const digits = (x, n) => minus(x.toLocaleString("en", { maximumSignificantDigits: n }));
const decimals = (x, n) => minus(x.toLocaleString("en", { minimumFractionDigits: n, maximumFractionDigits: n }));
const minus = (text) => text.replace("-", "−");
const whole = (x) => decimals(x, 0);

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const ascending = (a, b) => (a < b ? -1 : a > b ? 1 : 0); // of infinities, too

/** In ascending values, the last index whose value is at most x, or -1. */
function last(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Round numbers from low to high, about n of them. */
function ticks(low, high, n) {
  const rough = (high - low) / n;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= 0.7 * rough);
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9) + 0; i * step <= high + 1e-9 * step; i++) ticks.push(i * step);
  return ticks.map((value) => ({ value, text: decimals(value, places) }));
}

/** Powers of ten from low to high, with 2 and 5 times these where there is room; round numbers if there are too few. */
function logTicks(low, high, n) {
  const powers = [];
  for (let k = Math.floor(Math.log10(low)); 10 ** k <= high; k++) powers.push(10 ** k);
  const within = (values) => values.filter((value) => value >= 0.999 * low && value <= 1.001 * high);
  let values = within(powers.flatMap((power) => [power, 2 * power, 5 * power]));
  if (values.length < 3) return ticks(low, high, n);
  if (values.length > 2 * n) values = within(powers);
  const every = Math.ceil(values.length / (2 * n));
  return values.filter((_, i) => i % every === 0).map((value) => ({ value, text: digits(value, 1) }));
}

/** From a domain to pixels, linear or logarithmic. */
function scale([low, high], [from, to], log = false) {
  const f = log ? Math.log : (x) => x;
  return (x) => from + ((f(x) - f(low)) / (f(high) - f(low) || 1)) * (to - from);
}

/** Radio buttons; options are a text for each value, and the first is chosen. */
function choice(label, name, options, choose) {
  const buttons = Object.entries(options).map(([value, text], i) => {
    const input = h("input", { type: "radio", name, value, checked: i === 0, onchange: () => choose(value) });
    return h("label", {}, input, text);
  });
  return h("fieldset", {}, h("legend", {}, label), ...buttons);
}

/** A box that scrolls, also with the keyboard, if it is wider than the page. */
function scrolling(label, ...children) {
  return h("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

const pairs = (entries) => h("dl", {}, ...entries.flatMap(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]));

/**
 * Pointer and keyboard on a drawing. `place` makes points from events. `hover` gets a point or null, `drag` gets two
 * points while the user chooses a part, and `zoom` gets two at the end. `pick` gets the point of a click. `keys` has an
 * action for each key.
 */
function interact(node, { place, hover, drag, zoom, pick = () => {}, keys }) {
  let from = null;
  const release = (event) => {
    const began = from;
    from = null;
    drag(null);
    if (!began) return;
    const to = place(event);
    if (Math.hypot(to.x - began.x, to.y - began.y) > 5) zoom(began, to);
    else {
      hover(to);
      pick(to);
    }
  };
  node.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = place(event);
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => (from ? drag(from, place(event)) : hover(place(event))));
  node.addEventListener("pointerup", release);
  node.addEventListener("pointercancel", () => drag((from = null)));
  node.addEventListener("pointerleave", () => from || hover(null));
  node.addEventListener("blur", () => hover(null));
  node.addEventListener("dblclick", () => keys.Escape());
  node.addEventListener("keydown", (event) => {
    const act = keys[event.key === "=" ? "+" : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event.shiftKey ? 10 : 1);
  });
}

/** Where on a drawing of `width` an event is, in the drawing's own pixels. */
function position(event, node, width) {
  const box = node.getBoundingClientRect();
  return { x: ((event.clientX - box.left) * width) / box.width, y: ((event.clientY - box.top) * width) / box.width };
}

/** Draw again whenever the node's width has changed; `drawn` is the width of the last drawing. */
function onResize(node, drawn, draw) {
  new ResizeObserver(() => node.clientWidth && node.clientWidth !== drawn() && draw()).observe(node);
}
