"use strict";
// Draws the timeline, and memory below it, from the data in the page. Everything is drawn afresh when the view changes:
// one path for each color, and at most one shape for each pixel, however many spans there are.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figure = document.getElementById("figure");
  const svg = document.getElementById("drawing");
  const tip = document.getElementById("tip");
  const LEFT = 84, RIGHT = 14, TOP = 26, GAP = 6, MEMORY = 200, AXIS = 24, STRIP = 8;
  const whole = data.seconds || 1e-9;
  let view = [0, whole];
  let width = 0;

  // -- numbers, by the same tables as in the rest of the report -------------------------------------------------------

  const written = ([least, nothing, steps], value) => {
    if (value < least) return nothing;
    const [, size, digits, name] = steps.find(([start]) => value >= start);
    return `${(value / size).toFixed(digits)} ${name}`;
  };
  const seconds = (value) => written(data.scales.seconds, value);
  const bytes = (value) => written(data.scales.bytes, value);
  const plain = (value) => String(+value.toPrecision(9));
  const unitOf = ([, , steps], value) => steps.find(([start]) => value >= start);

  /** The distance between marks, 1, 2 or 5 times a power of ten, of which at most `most` fit. */
  const distance = (length, most) => {
    const least = length / Math.max(most, 1);
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999999);
  };

  // -- geometry -------------------------------------------------------------------------------------------------------

  const x = (time) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
  const timeAt = (px) => view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);
  const memory = data.memory;
  let bottom = TOP;
  const rows = data.lanes.map((lane) => {
    const height = lane.stream === "compute" ? 36 : 24;
    const row = { ...lane, y: bottom, height, begins: lane.spans.map((span) => span[0]) };
    bottom += height + GAP;
    return row;
  });
  const memoryTop = bottom + 22;
  const memoryBottom = memory ? memoryTop + MEMORY : bottom;
  const height = memoryBottom + AXIS + STRIP;
  const totals = memory ? memory.seconds.map((_, i) => memory.parts.reduce((sum, part) => sum + part[i], 0)) : [];
  const showsBudget = memory && data.budget !== null && data.budget <= 2.5 * memory.peak[1];
  const most = memory ? 1.1 * Math.max(memory.peak[1], showsBudget ? data.budget : 0, 1) : 1;
  const y = (size) => memoryBottom - (size / most) * MEMORY;

  /** How many of sorted `values` are at most `value`. */
  const upTo = (values, value) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= value) low = middle + 1; else high = middle;
    }
    return low;
  };

  // -- drawing --------------------------------------------------------------------------------------------------------

  const add = (parent, name, attributes, text) => {
    const element = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const line = (parent, css, x1, y1, x2, y2) => add(parent, "line", { class: css, x1, y1, x2, y2 });
  const box = (from, top, to, tall) => `M${from.toFixed(1)} ${top}H${to.toFixed(1)}v${tall}H${from.toFixed(1)}z`;
  const rectangle = (parent, css, from, top, to, tall) =>
    add(parent, "rect", { class: css, x: from, y: top, width: Math.max(to - from, 0), height: tall });

  /** The longest end of a dotted name that fits. */
  const fitting = (name, space) => {
    const parts = name.split(".");
    for (let i = 0; i < parts.length; i++) {
      const end = parts.slice(i).join(".");
      if (end.length * 6.2 + 3 <= space) return end;
    }
    return "";
  };

  const visible = (row) => {
    const first = Math.max(upTo(row.begins, view[0]) - 1, 0);
    return row.spans.slice(first, upTo(row.begins, view[1]));
  };

  const drawRow = (parent, row) => {
    const group = add(parent, "g", { "data-stream": row.stream, "data-lane": row.name });
    rectangle(group, "track", LEFT, row.y, width - RIGHT, row.height);
    const paths = {};
    const draw = (css, from, to) => { paths[css] = (paths[css] || "") + box(from, row.y, to, row.height); };
    let run = null; // spans that are narrower than a pixel
    const flush = () => {
      if (run) draw(run.css, run.from, Math.max(run.to, run.from + 0.7));
      run = null;
    };
    const labels = [];
    const waits = [];
    for (const [begin, end, unit, kind] of visible(row)) {
      const from = Math.max(x(begin), LEFT), to = Math.min(x(end), width - RIGHT);
      const css = `${kind} shade${unit % 3}`;
      if (to <= LEFT || from >= width - RIGHT) continue;
      if (kind === "wait") {
        waits.push([from, to]);
        continue;
      }
      if (to - from < 1) {
        if (run && run.kind === kind && from - run.to < 0.7) run.to = to;
        else { flush(); run = { from, to, kind, css }; }
        continue;
      }
      flush();
      draw(css, from, to - from > 4 ? to - 0.7 : to);
      const text = fitting(data.units[unit], to - from);
      if (text) labels.push([(from + to) / 2, text]);
    }
    flush();
    let last = -1;
    for (const [from, to] of waits) { // last, so on top: these are what one looks for
      if (to - last > 1) draw("wait", from, last = Math.max(to, from + 1));
    }
    for (const [css, d] of Object.entries(paths)) add(group, "path", { class: css, d });
    for (const [middle, text] of labels) {
      const y = row.y + row.height / 2 + 4;
      add(group, "text", { class: "unit", x: middle.toFixed(1), y, "text-anchor": "middle" }, text);
    }
    add(group, "text", { x: LEFT - 8, y: row.y + row.height / 2 + 4, "text-anchor": "end" }, row.name);
  };

  const drawStages = (parent) => {
    for (const [name, begin, end] of data.stages) {
      const from = Math.max(x(begin), LEFT), to = Math.min(x(end), width - RIGHT);
      if (to <= LEFT || from >= width - RIGHT) continue;
      if (x(begin) >= LEFT) line(parent, "border", from, 6, from, memoryBottom);
      if (name.length * 6.8 + 8 <= to - from) add(parent, "text", { class: "stage", x: from + 6, y: 17 }, name);
    }
  };

  /** For each pixel where memory changes, the point that is highest there: peaks never vanish. */
  const levels = () => {
    const found = [];
    let carried = Math.max(upTo(memory.seconds, view[0]) - 1, 0);
    let i = carried + 1;
    found.push([LEFT, carried]);
    while (i < memory.seconds.length && memory.seconds[i] <= view[1]) {
      const pixel = Math.floor(x(memory.seconds[i]));
      let highest = i;
      for (; i < memory.seconds.length && Math.floor(x(memory.seconds[i])) === pixel; i++) {
        if (totals[i] > totals[highest]) highest = i;
      }
      found.push([Math.max(pixel, LEFT), highest]);
      carried = i - 1;
      if (carried !== highest) found.push([pixel + 1, carried]);
    }
    return found;
  };

  const drawMemory = (parent) => {
    const [, size, , name] = unitOf(data.scales.bytes, most);
    const step = distance(most / size, 5);
    for (let mark = 0; mark * size <= most; mark += step) {
      line(parent, "grid", LEFT, y(mark * size), width - RIGHT, y(mark * size));
      const text = mark ? `${plain(mark)} ${name}` : "0";
      add(parent, "text", { x: LEFT - 8, y: y(mark * size) + 4, "text-anchor": "end" }, text);
    }
    add(parent, "text", { x: LEFT + 6, y: memoryTop - 6 }, "memory");
    const found = levels();
    const right = width - RIGHT;
    let below = found.map(() => 0);
    memory.parts.forEach((part, k) => {
      const above = found.map(([, i], n) => below[n] + part[i]);
      let d = "";
      found.forEach(([px], n) => { d += `${n ? "H" + px : "M" + px} ${n ? "V" : ""}${y(above[n]).toFixed(1)}`; });
      d += `H${right}V${y(below[found.length - 1]).toFixed(1)}`;
      for (let n = found.length - 1; n >= 0; n--) {
        d += `H${found[n][0]}` + (n ? `V${y(below[n - 1]).toFixed(1)}` : "z");
      }
      add(parent, "path", { class: memory.categories[k][1], d, "data-category": memory.categories[k][0] });
      below = above;
    });
    if (showsBudget) line(parent, "budget", LEFT, y(data.budget), right, y(data.budget));
  };

  const drawMarks = (parent) => {
    const [time, size, text] = memory.peak;
    const isRight = x(time) > (LEFT + width) / 2;
    if (data.budget !== null) {
      const label = `budget ${bytes(data.budget)}${showsBudget ? "" : ", above this drawing"}`;
      const at = showsBudget ? y(data.budget) - 6 : memoryTop - 6;
      const where = isRight ? { x: LEFT + 60, "text-anchor": "start" } : { x: width - RIGHT - 4, "text-anchor": "end" };
      add(parent, "text", { class: "mark", y: at, ...where }, label);
    }
    if (x(time) < LEFT || x(time) > width - RIGHT) return;
    add(parent, "circle", { class: "dot", cx: x(time), cy: y(size), r: 4 });
    const isUnderBudget = showsBudget && Math.abs(y(data.budget) - y(size)) < 22;
    const where = { x: x(time) + (isRight ? -9 : 9), y: y(size) + (isUnderBudget ? 18 : -7) };
    add(parent, "text", { class: "mark", ...where, "text-anchor": isRight ? "end" : "start" }, text);
  };

  const drawAxis = (parent) => {
    const step = distance(view[1] - view[0], (width - LEFT - RIGHT) / 90);
    const [, size, , name] = unitOf(data.scales.seconds, Math.max(view[1], step));
    for (let mark = Math.ceil(view[0] / step); mark * step <= view[1] * 1.0000001; mark++) {
      const at = x(mark * step);
      line(parent, "grid", at, memoryBottom, at, memoryBottom + 5);
      const anchor = at > width - 50 ? "end" : "middle";
      const place = anchor === "end" ? width - 4 : at;
      const label = `${plain((mark * step) / size)} ${name}`;
      add(parent, "text", { x: place, y: memoryBottom + 17, "text-anchor": anchor }, label);
    }
    if (view[1] - view[0] < whole) {
      const at = (time) => LEFT + (time / whole) * (width - LEFT - RIGHT);
      rectangle(parent, "track", LEFT, height - 6, width - RIGHT, 4);
      rectangle(parent, "thumb", at(view[0]), height - 6, Math.max(at(view[1]), at(view[0]) + 3), 4);
    }
  };

  let overlay;
  const draw = () => {
    width = Math.max(figure.clientWidth, 320);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    tip.hidden = true;
    if (memory) drawMemory(svg);
    for (const row of rows) drawRow(svg, row);
    drawStages(svg);
    if (memory) drawMarks(svg);
    drawAxis(svg);
    overlay = add(svg, "g", {});
  };

  let waiting = false;
  /** With the next picture of the screen: for what comes in quick succession. */
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };

  // -- moving about ---------------------------------------------------------------------------------------------------

  const show = (begin, end, drawing = draw) => {
    const length = Math.min(Math.max(end - begin, whole * 1e-5), whole);
    const from = Math.min(Math.max(begin, 0), whole - length);
    view = [from, from + length];
    hide();
    drawing();
  };
  const zoom = (factor, time = (view[0] + view[1]) / 2, drawing = draw) => {
    show(time - (time - view[0]) * factor, time + (view[1] - time) * factor, drawing);
  };
  const move = (part, drawing = draw) => {
    const far = part * (view[1] - view[0]);
    show(view[0] + far, view[1] + far, drawing);
  };
  const place = (event) => {
    const frame = svg.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };

  for (const button of document.querySelectorAll("button[data-view]")) {
    const [, begin, end] = data.stages[button.dataset.view] || ["", 0, whole];
    button.addEventListener("click", () => show(begin, end));
  }
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => zoom(+button.dataset.zoom));
  }
  svg.addEventListener("wheel", (event) => {
    const sideways = event.deltaX && Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey || event.shiftKey) {
      event.preventDefault();
      zoom(1.0015 ** (event.deltaY || event.deltaX), timeAt(place(event)[0]), redraw);
    } else if (sideways) {
      event.preventDefault();
      move(event.deltaX / width, redraw);
    }
  }, { passive: false });
  svg.addEventListener("dblclick", (event) => zoom(0.4, timeAt(place(event)[0])));
  svg.addEventListener("keydown", (event) => {
    const actions = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7), "0": () => show(0, whole),
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
    };
    if (event.ctrlKey || event.metaKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
  let dragged = null;
  svg.addEventListener("pointerdown", (event) => {
    dragged = { px: event.clientX, view };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", () => { dragged = null; });
  svg.addEventListener("pointercancel", () => { dragged = null; });
  svg.addEventListener("pointermove", (event) => {
    if (!dragged) return hover(event);
    const far = ((dragged.px - event.clientX) / (width - LEFT - RIGHT)) * (dragged.view[1] - dragged.view[0]);
    show(dragged.view[0] + far, dragged.view[1] + far, redraw);
  });
  svg.addEventListener("pointerleave", () => hide());

  // -- what lies under the pointer ------------------------------------------------------------------------------------

  const hide = () => {
    tip.hidden = true;
    if (overlay) overlay.replaceChildren();
  };

  const spanAt = (row, px) => {
    const near = upTo(row.begins, timeAt(px)) - 1;
    const distanceTo = ([begin, end]) => Math.max(x(begin) - px, px - x(end), 0);
    const found = [near, near + 1].filter((i) => row.spans[i]).map((i) => row.spans[i]);
    return found.sort((a, b) => distanceTo(a) - distanceTo(b)).find((span) => distanceTo(span) <= 2);
  };

  const outline = (unit) => {
    let d = "";
    for (const row of rows) {
      for (const [begin, end, other] of visible(row)) {
        const from = Math.max(x(begin), LEFT), to = Math.min(x(end), width - RIGHT);
        if (other === unit && to - from >= 1) d += box(from, row.y, to, row.height);
      }
    }
    add(overlay, "path", { class: "same", d });
  };

  const tellMemory = (i, time) => {
    const head = document.createElement("b");
    head.textContent = `${bytes(totals[i])} at ${seconds(time)} (simulated)`;
    const lines = memory.categories.map(([name, css], k) => {
      const row = document.createElement("div"), label = document.createElement("span");
      const swatch = document.createElement("i"), value = document.createElement("span");
      swatch.className = css;
      label.append(swatch, name);
      value.textContent = bytes(memory.parts[k][i]);
      row.append(label, value);
      return row;
    });
    tip.replaceChildren(head, ...lines.reverse());
  };

  const hover = (event) => {
    const [px, py] = place(event);
    hide();
    if (px < LEFT || px > width - RIGHT) return;
    line(overlay, "cursor", px, TOP, px, memoryBottom);
    const row = rows.find((one) => py >= one.y && py <= one.y + one.height);
    const span = row && spanAt(row, px);
    if (span) {
      outline(span[2]);
      const [first, ...more] = span[4].split("\n");
      const head = document.createElement("b");
      head.textContent = first;
      tip.replaceChildren(head, ...more.map((text) => {
        const element = document.createElement("p");
        element.textContent = text;
        return element;
      }));
    } else if (memory && py >= memoryTop && py <= memoryBottom) {
      // Near the peak's mark, the peak itself: it may last for less than a pixel.
      const [peak, size] = memory.peak;
      if (Math.abs(px - x(peak)) <= 3) tellMemory(Math.max(totals.indexOf(size), 0), peak);
      else tellMemory(Math.max(upTo(memory.seconds, timeAt(px)) - 1, 0), timeAt(px));
    } else return;
    tip.hidden = false;
    const frame = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - frame.width - 8), 4)}px`;
    const under = event.clientY + 18;
    tip.style.top = `${under + frame.height > innerHeight ? Math.max(event.clientY - frame.height - 12, 4) : under}px`;
  };

  draw();
  new ResizeObserver(() => { if (figure.clientWidth !== width) redraw(); }).observe(figure);
})();
