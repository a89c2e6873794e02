"""Reports to look at: flame charts by module, and memory over time, as a page or a picture.

Plain numbers come in, text or bytes go out; knows no report, no tracker and no torch.
"""

from ._chart import Chart
from ._flame import Amounts, Frame, Stack, frames_of
from ._memory_line import Area, Change, MemoryLine, memory_line
from ._page import page
from ._png import png

__all__ = [
    "Amounts",
    "Area",
    "Change",
    "Chart",
    "Frame",
    "MemoryLine",
    "Stack",
    "frames_of",
    "memory_line",
    "page",
    "png",
]
