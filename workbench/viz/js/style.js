// The style sheet of a view. Its text comes from the .css files when the modules are put together.

export const STYLE = "__STYLE__";
