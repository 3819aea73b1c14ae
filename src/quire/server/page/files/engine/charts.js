// Small charts on a canvas; what they show is also said in words below them.

import { colour, count, duration, prepared } from "../dom.js";

// One or two lines, each on a scale of its own; the greatest value stands above.
export function sparkline(canvas, series) {
  const [context, width, height] = prepared(canvas, 96);
  context.clearRect(0, 0, width, height);
  const floor = height - 16;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("ink-soft");
  context.textAlign = "left";
  context.fillText(`${series[0].values.length} s ago`, 0, height - 4);
  context.textAlign = "right";
  context.fillText("now", width, height - 4);
  context.strokeStyle = colour("rule");
  context.lineWidth = 1;
  line(context, [[0, floor + 0.5], [width, floor + 0.5]]);
  series.forEach(({ values, name, unit, dashed }, i) => {
    const top = Math.max(1, ...values);
    context.textAlign = i ? "right" : "left";
    context.fillText(`${count(Math.round(top))} ${unit}`, i ? width : 0, 10);
    context.strokeStyle = colour(name);
    context.lineWidth = 1.5;
    context.setLineDash(dashed ? [3, 3] : []);
    line(context, values.map((value, i) => [(i / (values.length - 1)) * width, floor - (value / top) * (floor - 16)]));
  });
  context.setLineDash([]);
}

function line(context, points) {
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

const PER_DECADE = 5;

// How often what lasted how long, on a logarithmic scale. `marked` is one value to be pointed out.
export function histogram(canvas, values, marked) {
  const [context, width, height] = prepared(canvas, 74);
  context.clearRect(0, 0, width, height);
  const floor = height - 16;
  context.strokeStyle = colour("rule");
  context.lineWidth = 1;
  line(context, [[0, floor + 0.5], [width, floor + 0.5]]);
  const known = values.filter((value) => value > 0);
  if (!known.length) return;
  const all = marked > 0 ? [...known, marked] : known;
  const place = (value) => Math.log10(value) * PER_DECADE;
  const least = Math.floor(place(Math.min(...all))) - 1;
  const most = Math.floor(place(Math.max(...all))) + 2;
  const counts = new Array(most - least).fill(0);
  for (const value of known) counts[Math.floor(place(value)) - least] += 1;
  const top = Math.max(...counts);
  const step = width / counts.length;
  const barWidth = Math.max(1, Math.min(step - 2, 40));
  const middle = (i) => (i + 0.5) * step;
  context.fillStyle = colour("owned");
  counts.forEach((each, i) => {
    const tall = (each / top) * (floor - 6);
    context.fillRect(middle(i) - barWidth / 2, floor - tall, barWidth, tall);
  });
  if (marked > 0) {
    const x = (place(marked) - least) * step;
    context.strokeStyle = colour("rubric");
    context.lineWidth = 2;
    line(context, [[x, 2], [x, floor]]);
  }
  context.fillStyle = colour("ink-soft");
  context.font = "11px system-ui, sans-serif";
  const labels = Math.min(counts.length, Math.max(2, Math.floor(width / 80)));
  for (let label = 0; label < labels; label += 1) {
    const i = Math.round((label * (counts.length - 1)) / Math.max(1, labels - 1));
    context.textAlign = label === 0 ? "left" : label === labels - 1 ? "right" : "center";
    const x = label === 0 ? 0 : label === labels - 1 ? width : middle(i);
    context.fillText(duration(10 ** ((i + least + 0.5) / PER_DECADE)), x, height - 4);
  }
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
