// The stylesheet of a view; the text comes from dashboard.css when the modules are put together.

export const STYLE = __STYLE__;
