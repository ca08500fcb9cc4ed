// The most likely tokens beside an output token, as bars with their probabilities.

import { h, plain } from "./dom.js";

const percent = (share) => `${(share * 100).toFixed(share < 0.001 ? 2 : 1)}%`;

/** The effect of the sampling parameters on a candidate. */
function fate({ drawn, probability, removed_by: removed }) {
  if (removed) return `removed by ${removed.replaceAll("_", " ")}`;
  if (drawn === null || drawn === 1 || Math.abs(drawn - probability) < 0.0005) return "";
  return `drawn with ${percent(drawn)}`;
}

/**
 * The candidates for one output token as a list of bars: the model's probability, what the sampling parameters made of
 * it, and which token was sampled.
 */
export function candidateBars({ candidates, sampled, how }) {
  const bar = (candidate) => {
    const { id, text, probability } = candidate, words = fate(candidate), isSampled = id === sampled;
    const name = text ? JSON.stringify(plain(text, 24)) : `token ${id}`;
    const props = {
      style: `--wb-share:${(probability * 100).toFixed(2)}%`,
      title: `token ${id}`,
      "data-sampled": isSampled ? "true" : null,
      "data-removed": candidate.removed_by ? "true" : null,
    };
    const marks = [isSampled ? h("b", {}, " sampled") : null, words ? h("small", {}, ` ${words}`) : null];
    return h("li", props, h("bdi", {}, `${name} ${percent(probability)}`), ...marks);
  };
  return [h("p", { class: "wb-how" }, how), h("ol", { class: "wb-bars" }, candidates.map(bar))];
}
