"use strict";
{
  const { sizes, labels, rounds } = JSON.parse(document.getElementById("data").textContent);
  const caption = document.getElementById("caption");
  const panel = document.getElementById("tree");
  const text = document.querySelector(".text");
  const spans = Array.from(text.children); // the prompt's token first, then one for each round

  const svg = (name, attributes, parent) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };

  function draw(round) {
    const { node, row, gap, margin } = sizes;
    const accepted = new Set(round.accepted);
    const place = (index) => {
      const [full, clip, width] = labels[index < 0 ? round.root : round.ids[index]];
      const left = round.columns[index < 0 ? 0 : round.depths[index]];
      const middle = margin + node / 2 + row * (index < 0 ? 0 : round.rows[index]);
      return { full, clip, width, left, middle };
    };
    const image = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const indices = Array.from(round.ids.keys());
    for (const drawn of [indices.filter((i) => !accepted.has(i)), round.accepted]) {
      for (const index of drawn) {
        const { left, middle } = place(index);
        const from = place(round.parents[index]);
        const d = "M" + (from.left + from.width) + " " + from.middle + "H" + (left - gap / 2) + "V" + middle + "H" + left;
        svg("path", { class: "ddtree-edge" + (accepted.has(index) ? " ddtree-accepted" : ""), d }, image);
      }
    }
    for (const index of [-1, ...indices]) {
      const { full, clip, width, left, middle } = place(index);
      const took = accepted.has(index);
      const shade = index < 0 ? 0 : round.shades[index] / 1000;
      const kind = index < 0 ? " ddtree-root" : took ? " ddtree-accepted" : "";
      const group = svg("g", { class: "ddtree-node" + kind }, image);
      const about = index < 0 ? "root" : "probability " + shade.toFixed(3) + (took ? ", accepted" : "");
      svg("title", {}, group).textContent = full + " · " + about;
      const [x, y] = [left, middle - node / 2];
      svg("rect", { x, y, width, height: node, rx: 4, "fill-opacity": shade }, group);
      svg("text", { x: left + width / 2, y: middle }, group).textContent = clip;
    }
    const width = round.columns[round.columns.length - 1] - gap + margin;
    const height = 2 * margin + node + row * Math.max(0, ...round.rows);
    const label = "draft tree of " + round.ids.length + " nodes, " + accepted.size + " accepted";
    const attributes = { class: "ddtree", width, height, viewBox: "0 0 " + width + " " + height, role: "img" };
    for (const [key, value] of Object.entries(attributes)) image.setAttribute(key, value);
    image.setAttribute("aria-label", label);
    return image;
  }

  function describe(round, number) {
    const nodes = round.ids.length + round.leftOut;
    let words = "Round " + number + " of " + rounds.length + ": ";
    words += nodes ? nodes + " nodes, " + round.accepted.length + " accepted, then " : "no draft; ";
    words += "the target's own “" + labels[round.last][0] + "”";
    return round.leftOut ? words + " (" + round.leftOut + " less probable nodes not drawn)" : words;
  }

  let shown = null;
  function show(span) {
    if (span === shown) return;
    shown?.classList.remove("shown");
    shown = span;
    span.classList.add("shown");
    const number = spans.indexOf(span);
    caption.textContent = number ? describe(rounds[number - 1], number) : "The first token, from the prompt's forward";
    panel.replaceChildren(...(number ? [draw(rounds[number - 1])] : []));
    panel.scrollTo(0, 0);
  }

  const spanOf = (event) => spans.find((span) => span.contains(event.target));
  const showHit = (event) => {
    const span = spanOf(event);
    if (span) show(span);
  };
  text.addEventListener("pointerover", showHit);
  text.addEventListener("focusin", showHit);
  // Back to the one that was clicked on, so that the pointer's way to the tree does not change it.
  text.addEventListener("pointerleave", () => {
    if (spans.includes(document.activeElement)) show(document.activeElement);
  });
  text.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const next = spans[spans.indexOf(spanOf(event)) + steps[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  show(spans[Math.min(1, rounds.length)]);
}
