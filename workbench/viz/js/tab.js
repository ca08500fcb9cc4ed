// Values that the browser's tab keeps over a reload. A browser that lets a page keep nothing forgets them.

/** Keep a value under a name; null forgets it. */
export function keep(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    // The value ends with the page.
  }
}

/** The value under a name; null for none. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}
