"""Three panels of the dashboard beside a plot made here, all at one cursor.

Run it with ``panel serve examples/own_dashboard.py --show``. A live engine in place of the simulated trace works too.
"""

import numpy as np
import panel as pn
from bokeh.plotting import figure

from workbench import panes, simulate

pn.extension(inline=True)  # nothing is loaded from the network

requests = [{"id": "long", "prompt": {"len": 900}, "max_tokens": 24}]
requests += [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 24, "arrival_step": 2 * i} for i in range(8)]
trace = simulate({"requests": requests}, config={"max_num_batched_tokens": 128, "num_blocks": 160})

timeline, chunks, pool = panes.Timeline(trace), panes.Chunks(trace), panes.Pool(trace)
cursor = pool.cursor  # the same object for all three

waiting = np.array([len(step.waiting) for step in trace])
plot = figure(height=220, sizing_mode="stretch_width", title="Waiting requests", x_axis_label="step")
plot.step(np.arange(len(trace)), waiting, mode="after")
mark = plot.vspan(x=[0], line_width=2, line_color="#B8005C")


def move_mark(step: int) -> str:
    """Put the mark of the plot at the cursor, and tell the step."""
    mark.data_source.data = {"x": [step]}
    return str(trace[step])


cursor.step = len(trace) - 1  # begin at the end
slider = pn.widgets.IntSlider(name="step", start=0, end=len(trace) - 1, value=cursor.step)
slider.link(cursor, value="step", bidirectional=True)  # a click into a panel moves the slider, too

pn.Column(
    pn.pane.Markdown(pn.bind(move_mark, cursor.param.step)),
    slider,
    timeline,
    pn.Row(chunks, pool),
    plot,
    trace.figure(),  # with a mark that follows the cursor, and a selection that moves it
    sizing_mode="stretch_width",
).servable(title="Own dashboard")
