// The worker: loads Pyodide and the package, then passes messages to workbench/apps/playground/session.py.

const here = new URL(".", import.meta.url);
const PYODIDE = new URL("pyodide/", here).href;

const HANDLE = `
import sys
sys.path.insert(0, "/package.zip")
from workbench.apps.playground.session import Session

session = Session()

def handle(message, content=None):
    return tuple(session.handle(message, None if content is None else content.to_bytes()))

handle
`;

async function load(name) {
  const response = await fetch(new URL(name, here));
  if (!response.ok) throw new Error(`${name} could not be loaded (${response.status} ${response.statusText})`);
  return response;
}

async function start() {
  const began = performance.now();
  const { wheel, package: modules } = await (await load("parts.json")).json();
  const { loadPyodide } = await import(`${PYODIDE}pyodide.mjs`);
  const [python, ...contents] = await Promise.all([
    loadPyodide({ indexURL: PYODIDE }),
    ...[wheel, modules].map(async (name) => (await load(name)).arrayBuffer()),
  ]);
  python.unpackArchive(contents[0], "wheel");
  python.FS.writeFile("/package.zip", new Uint8Array(contents[1])); // modules are imported from it as it is
  const handle = python.runPython(HANDLE);
  return { handle, seconds: (performance.now() - began) / 1000 };
}

const started = start();
started.then(
  ({ seconds }) => postMessage({ ready: true, seconds }),
  (problem) => postMessage({ fatal: String(problem.message ?? problem) }),
);

onmessage = async ({ data }) => {
  const { handle } = await started;
  try {
    const answer = data.content ? handle(data.message, new Uint8Array(data.content)) : handle(data.message);
    const [facts, packet, other] = answer.toJs();
    answer.destroy();
    const buffers = [packet, other].filter(Boolean).map((bytes) => bytes.buffer);
    postMessage({ id: data.id, facts: JSON.parse(facts), packet, other }, { transfer: buffers });
  } catch (problem) {
    const lines = String(problem.message ?? problem).trim().split("\n");
    postMessage({ id: data.id, facts: { error: lines.at(-1) } });
  }
};
