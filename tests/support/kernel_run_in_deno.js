// Marks of a recorded kernel for tests/viz/test_marks_of_kernel_runs.py: reads a packet, answers one question per line.
import { KernelRun } from "../../workbench/viz/js/kernel_run_file.js";
import * as launch from "../../workbench/viz/js/kernel_run_launch.js";
import * as marks from "../../workbench/viz/js/kernel_run_marks.js";

const bytes = Deno.readFileSync(Deno.args[0]);
const run = new KernelRun(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength));
const plain = (value) =>
  value instanceof Map ? [...value] : ArrayBuffer.isView(value) ? Array.from(/** @type {any} */ (value)) : value;
const questions = JSON.parse(await new Response(Deno.stdin.readable).text());
const answers = questions.map(([name, ...values]) => {
  if (name === "values") return run.valuesOf(values[0]);
  if (name === "meeting") return run.meetingOf(values[0]);
  if (name === "gridRows" || name === "groupAt") return launch[name](...values);
  return plain({ ...marks, ...launch }[name](run, ...values));
});
// JSON has no infinities.
console.log(
  JSON.stringify(answers, (_, value) => typeof value === "number" && !Number.isFinite(value) ? String(value) : value),
);
