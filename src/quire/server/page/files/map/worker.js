// Computes what needs the whole cache, beside the page, so that the page does not stutter.

import { arrange, prefixForest } from "./arrange.js";

addEventListener("message", ({ data: { number, tier, wants } }) => {
  const start = performance.now();
  const answer = { number };
  if (wants.order) Object.assign(answer, arrange(tier));
  if (wants.forest) answer.forest = prefixForest(tier);
  answer.seconds = (performance.now() - start) / 1000;
  postMessage(answer, answer.order ? [answer.order.buffer] : []);
});
