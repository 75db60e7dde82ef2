"""A user's view and actions on a report's page."""

from collections.abc import Callable
from typing import Any


def column(tab: Any, title: str, table: str = "#runs-table") -> list[str]:
    """Return the cells of the column with that title, from the top."""
    return list(
        tab.evaluate(
            """([table, title]) => {
              const at = [...document.querySelectorAll(`${table} th`)].findIndex((head) => head.textContent === title);
              return [...document.querySelectorAll(`${table} tbody tr`)].map((row) => row.cells[at].innerText);
            }""",
            [table, title],
        )
    )


def drawn(tab: Any, name: str) -> Any:
    """Return a plot, once it is drawn."""
    tab.locator(f"#{name}").scroll_into_view_if_needed()
    tab.locator(f"#{name}[data-drawn]").wait_for(state="attached")
    return tab.locator(f"#{name}")


def traces(tab: Any, name: str) -> list[dict[str, Any]]:
    drawn(tab, name)
    return list(tab.evaluate(f"at('{name}').data.map(({{x, y, text, line}}) => ({{x, y, text, line}}))"))


def redrawn(tab: Any, name: str, act: Callable[[], Any]) -> None:
    """Call `act`, and wait until the plot was drawn again."""
    before = drawn(tab, name).get_attribute("data-drawn")
    act()
    tab.locator(f"#{name}:not([data-drawn='{before}'])").wait_for(state="attached")
