"""The playground: the scheduler, the simulator and the dashboard in a web page, with nothing to install.

The page runs this package in Pyodide, CPython compiled to WebAssembly. `session` is the part that runs there,
`presets` holds what the page offers, `site` puts the page's files into a folder, `bytecode` compiles its modules,
`runtime` finds Pyodide, and `server` serves the folder on this machine.
"""
