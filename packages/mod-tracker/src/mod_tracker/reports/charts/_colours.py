"""Colours of phases and of areas, told apart by those who do not see red and green alike."""

PHASES = {
    "forward": "#56b4e9",
    "recompute": "#e69f00",
    "backward": "#5fc9a6",
    "outside": "#b9bec5",
}

AREAS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"),
    *("#d55e00", "#f0e442", "#7a6fbf", "#8c6d46", "#9aa0a6"),
)
