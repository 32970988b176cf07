/* Refreshes the list of locks, for whoever asked for it, and stays out of the way. */
"use strict";
{
    const PERIOD = 5000;
    const CHOICE = "dblocks.refresh";

    const start = function () {
        const box = document.getElementById("dblocks-refresh");
        const form = document.getElementById("changelist-form");
        if (!box || !form) {
            return;
        }
        const status = document.getElementById("dblocks-refresh-status");
        let timer = null;
        let isWaiting = false;
        let selectionIsStale = false;

        const isBusy = function () {
            const focused = document.activeElement;
            return (
                document.hidden ||
                form.querySelector("tbody input:checked, #action-toggle:checked") ||
                (focused !== box &&
                    focused.matches("input, select, textarea, #result_list *")) ||
                !document.getSelection().isCollapsed
            );
        };

        const replace = function (fresh, selector) {
            const [before, after] = [form, fresh].map((parent) =>
                parent.querySelector(selector),
            );
            if (before && after) {
                before.replaceWith(after);
            }
        };

        const show = function (fresh) {
            const table = form.querySelector(".results");
            const freshTable = fresh.querySelector(".results");
            if (table && freshTable) {
                replace(fresh, "#result_list tbody");
            } else if (table) {
                table.remove();
            } else if (freshTable) {
                // In Django 6.1 the paginator is in a footer.
                form.querySelector(".changelist-footer, .paginator").before(freshTable);
            }
            replace(fresh, ".action-counter");
            replace(fresh, ".paginator");
            selectionIsStale = true;
        };

        const refresh = async function () {
            if (isBusy()) {
                status.textContent = status.dataset.paused;
                return;
            }
            // Of two answers, the older one may come last.
            if (isWaiting) {
                status.textContent = status.dataset.failed;
                return;
            }
            isWaiting = true;
            try {
                const response = await fetch(window.location.href, {
                    headers: { Accept: "text/html" },
                });
                const page = new DOMParser().parseFromString(
                    await response.text(),
                    "text/html",
                );
                const fresh = page.getElementById("changelist-form");
                // Elsewhere is a login page, or the list without its filters.
                if (!fresh || response.redirected) {
                    throw new Error(response.status);
                }
                // The user may have begun something meanwhile.
                if (box.checked && !isBusy()) {
                    show(fresh);
                    status.textContent = "";
                }
            } catch {
                status.textContent = status.dataset.failed;
            } finally {
                isWaiting = false;
            }
        };

        const choose = function () {
            clearInterval(timer);
            status.textContent = "";
            if (box.checked) {
                timer = setInterval(refresh, PERIOD);
                sessionStorage.setItem(CHOICE, "on");
            } else {
                sessionStorage.removeItem(CHOICE);
            }
        };

        // The admin's own script knows the checkboxes that it found at the start. It
        // is told of new ones when the first of them is used.
        const renewSelection = function (event) {
            if (selectionIsStale && event.target.matches("#result_list input")) {
                selectionIsStale = false;
                window.Actions(form.querySelectorAll("tr input.action-select"));
            }
        };

        document.addEventListener("click", renewSelection, true);
        box.addEventListener("change", choose);
        box.checked = sessionStorage.getItem(CHOICE) === "on";
        box.closest("[hidden]").hidden = false;
        choose();
    };

    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", start);
    } else {
        start();
    }
}
