// Files that the page makes of what it shows: csv, svg and png. Nothing is sent anywhere.

const SCALE = 2; // pixels of a png for each pixel of the page
// what the stylesheet says about a drawing, written into it
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray",
  "stroke-linecap", "stroke-linejoin", "paint-order", "text-anchor", "dominant-baseline", "font-size", "font-family"];

/** Offer a file. */
function save(name, blob) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60000);
}

/** Rows of values as csv; null is empty, an infinity nan. A text that a spreadsheet would compute stays a text. */
function csv(rows) {
  const cell = (value) => {
    if (typeof value === "number") return Number.isFinite(value) ? String(value) : "nan";
    const text = String(value ?? "").replace(/^[=+\-@\t\r]/, "'$&");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return new Blob(rows.map((row) => `${row.map(cell).join(",")}\n`), { type: "text/csv" });
}

/** A drawing on its own: with its styles, a background, a title, and a line of its key for each arm. */
function alone(svg, title, arms) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const colour = (name) => `rgb(${colours(document.body, name)[0].join(" ")})`;
  const font = getComputedStyle(svg).fontFamily;
  const words = (size, place, text) => {
    return s("text", { ...place, "font-size": size, "font-family": font, fill: colour("ink") }, printable(text));
  };
  const longest = Math.max(0, ...arms.map(({ label }) => label.length));
  const columns = Math.max(1, Math.floor((width - 50) / (50 + 7 * longest)));
  const top = 28;
  const full = height + top + 20 * Math.ceil(arms.length / columns) + 8;
  const copy = styled(svg);
  for (const node of copy.querySelectorAll(".cross, .selection")) node.remove();
  const key = arms.flatMap(({ label, line }, i) => {
    const [x, y] = [50 + (i % columns) * ((width - 50) / columns), height + top + 14 + 20 * Math.floor(i / columns)];
    const stroke = fill(line.cloneNode(), { x1: x, x2: x + 26, y1: y - 4, y2: y - 4 }, []);
    return [stroke, words(12, { x: x + 34, y }, label)];
  });
  const heading = words(14, { x: 8, y: 19, "font-weight": 600 }, title);
  const back = s("rect", { width, height: full, fill: colour("paper") });
  const inner = s("g", { transform: `translate(0 ${top})` }, ...copy.childNodes);
  const root = s("svg", { width, height: full, viewBox: `0 0 ${width} ${full}` },
    s("title", {}, printable(title)), back, heading, inner, ...key);
  return { text: new XMLSerializer().serializeToString(root), width, height: full };
}

/** A copy of a drawing that has the stylesheet's values as attributes. */
function styled(node) {
  const copy = node.cloneNode(true);
  const of = (root) => [root, ...root.querySelectorAll("*")];
  const copies = of(copy);
  of(node).forEach((original, i) => {
    const style = getComputedStyle(original);
    for (const name of STYLES) copies[i].setAttribute(name, style.getPropertyValue(name));
  });
  return copy;
}

/** Text without the characters that XML does not allow. */
const printable = (text) => text.toWellFormed().replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "\ufffd");

/** The picture of an svg, as a png. */
async function pixels({ text, width, height }) {
  const href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = href;
  await image.decode();
  const canvas = h("canvas", { width: SCALE * width, height: SCALE * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(href);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
