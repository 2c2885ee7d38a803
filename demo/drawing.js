// The picture that is asked about: strokes on it go to the server as shares of its width.
const COLOURS = [["red", "#d72828"], ["yellow", "#f5dc32"], ["green", "#28963c"],
  ["blue", "#2d55d7"], ["black", "#191919"], ["white", "#fcfcfc"]];
const WIDTH = 0.03;
let strokes = [], stroke = null, colour = COLOURS[0][1];
const find = (name) => element.querySelector(name);

function paint() {
  const canvas = find("canvas");
  if (!canvas) return;
  const box = canvas.getBoundingClientRect();
  if (!box.width) return;
  canvas.width = Math.round(box.width * devicePixelRatio);
  canvas.height = Math.round(box.height * devicePixelRatio);
  const pen = canvas.getContext("2d"), side = canvas.width;
  pen.lineCap = pen.lineJoin = "round";
  for (const { colour, width, points } of strokes) {
    pen.strokeStyle = colour;
    pen.lineWidth = width * side;
    pen.beginPath();
    points.forEach(([x, y], i) => (i ? pen.lineTo(x * side, y * side) : pen.moveTo(x * side, y * side)));
    if (points.length === 1) pen.lineTo(points[0][0] * side, points[0][1] * side);
    pen.stroke();
  }
  for (const name of [".mm-undo", ".mm-erase"]) find(name).disabled = !strokes.length;
}

function place(event) {
  const box = find("canvas").getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.width];
}

function changed() {
  paint();
  trigger("drawn", { strokes: strokes });
}

function setUp() {
  strokes = [];
  stroke = null;
  const pens = find(".mm-pens"), canvas = find("canvas"), picture = find(".mm-pad img");
  if (!pens || !canvas) return;
  pens.innerHTML = "";
  for (const [name, value] of COLOURS) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "mm-pen";
    button.style.background = value;
    button.setAttribute("aria-label", "Draw in " + name);
    button.setAttribute("aria-pressed", value === colour);
    button.onclick = () => {
      colour = value;
      for (const x of pens.children) x.setAttribute("aria-pressed", x === button);
    };
    pens.append(button);
  }
  find(".mm-undo").onclick = () => { strokes.pop(); changed(); };
  find(".mm-erase").onclick = () => { strokes = []; changed(); };
  canvas.onpointerdown = (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    stroke = { colour: colour, width: WIDTH, points: [place(event)] };
    strokes.push(stroke);
    paint();
    event.preventDefault();
  };
  canvas.onpointermove = (event) => {
    if (!stroke) return;
    stroke.points.push(place(event));
    paint();
  };
  canvas.onpointerup = canvas.onpointercancel = () => {
    if (!stroke) return;
    stroke = null;
    changed();
  };
  picture.onload = paint;
  new ResizeObserver(paint).observe(canvas);
  paint();
}

setUp();
watch("value", setUp);
