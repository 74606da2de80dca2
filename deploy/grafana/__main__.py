"""Write the dashboards' JSON: python -m deploy.grafana"""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import gateway, speculation
from deploy.grafana.dashboard_queries import FOLDER


def rendered() -> dict[str, str]:
    """File name -> its content."""
    boards = {"speculation.json": speculation.dashboard(), "gateway.json": gateway.dashboard()}
    texts = {}
    for name, builder in boards.items():
        board = builder.build()
        for number, panel in enumerate(board.panels, start=1):  # links to a panel use it
            panel.id_val = number
        for variable in board.templating.list_val:
            # The builder's defaults; only a variable that is an interval has them.
            variable.auto = variable.auto_min = variable.auto_count = None
        texts[name] = JSONEncoder(sort_keys=True, indent=1).encode(board) + "\n"
    return texts


def main() -> None:
    """Write the files, and say which."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
