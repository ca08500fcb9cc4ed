// Making elements. Text is only ever inserted as text: nothing here parses HTML.

/** An element with attributes and children; text becomes a text node. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.flat());
  return element;
}

/** The element with an id, which the page has. */
export const at = (id) => /** @type {any} */ (document.getElementById(id));

/** Replace the options of a select: pairs of value and words. */
export function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, words]) => h("option", { value }, words)));
}
