"""Runs a project's ``shop.tasks`` as a library for tasks does: ``python -m … NAME``.

The project is that of ``tests.test_queues``; each function here is called in a process
of its own, with the library's example on the page for ``shop/tasks.py``, on a database
that this process makes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import django
from django.core.management import call_command
from django.db import connections

from dblocks import LockTimeout
from dblocks.test import hold_elsewhere

DEADLINE = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def skipped(run: Callable[[], Any]) -> None:
    """Run the nightly job, and again at once."""
    from shop.reports import written

    run()
    run()
    assert written() == ["nightly"]


def celery() -> None:
    from celery import Celery
    from celery.contrib.testing.worker import start_worker
    from celery.signals import task_retry
    from shop.reports import written
    from shop.tasks import build_report, nightly

    app = Celery("shop", broker="memory://", set_as_current=True)
    retried = threading.Event()
    task_retry.connect(lambda **kwargs: retried.set(), weak=False)
    with start_worker(app, pool="solo", perform_ping_check=False):
        with hold_elsewhere("report:7"):
            build_report.delay(7)
            assert retried.wait(DEADLINE)
            assert written() == []
        nightly.delay()
        nightly.delay()
        until(lambda: len(written()) == 2)
    assert sorted(written()) == ["7", "nightly"]


def celery_killed() -> None:
    """Kill the process that runs a task; the task is delivered again and ends well."""
    from celery import Celery
    from shop.reports import written
    from shop.tasks import build_report

    app = Celery("shop", broker=os.environ["REDIS_URL"], set_as_current=True)
    app.conf.worker_hijack_root_logger = False
    command = ["worker", "--pool", "prefork", "-c", "1", "--without-gossip"]
    pid = os.fork()
    if not pid:
        app.worker_main([*command, "--without-mingle", "--without-heartbeat"])
        os._exit(0)
    try:
        build_report.delay(7)
        until(lambda: len(written()) == 1)
        os.kill(int(written()[0]), signal.SIGKILL)
        until(lambda: len(written()) == 3)
        first, again, done = written()
        assert first != again
        assert done == "7"
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def django_tasks() -> None:
    from shop.reports import written
    from shop.tasks import build_report

    assert build_report.enqueue(7).status == "SUCCESSFUL"
    assert written() == ["7"]


def django_q() -> None:
    from django_q.tasks import async_task
    from shop.reports import written

    async_task("shop.tasks.build_report", 7, sync=True)
    assert written() == ["7"]
    with hold_elsewhere("report:7"), suppress(LockTimeout):
        async_task("shop.tasks.build_report", 7, sync=True)
    assert written() == ["7"]


def huey() -> None:
    from huey.contrib.djhuey import HUEY
    from shop.reports import written
    from shop.tasks import build_report, nightly

    HUEY.immediate = True
    skipped(nightly)
    HUEY.immediate = False
    build_report(7)
    with hold_elsewhere("report:7"):
        HUEY.execute(HUEY.dequeue())
    assert written() == ["nightly"]
    [again] = HUEY.scheduled()
    HUEY.execute(again, again.eta)
    assert written() == ["nightly", "7"]


def dramatiq() -> None:
    import dramatiq as library
    from dramatiq.brokers.stub import StubBroker

    tried = threading.Event()

    class Watch(library.Middleware):  # type: ignore[misc,name-defined]
        def after_process_message(self, *args: Any, **kwargs: Any) -> None:
            tried.set()

    broker = StubBroker()
    broker.add_middleware(Watch())
    library.set_broker(broker)
    from shop.reports import written
    from shop.tasks import build_report

    worker = library.Worker(broker, worker_timeout=100)
    worker.start()
    try:
        with hold_elsewhere("report:7"):
            build_report.send(7)
            assert tried.wait(DEADLINE)
            assert written() == []
        until(lambda: written() == ["7"])
    finally:
        worker.stop()


def rq() -> None:
    from redis import Redis
    from rq import Queue, Worker
    from shop.reports import written
    from shop.tasks import build_report

    connection = Redis.from_url(os.environ["REDIS_URL"])
    queue = Queue("default", connection=connection)
    worker = Worker([queue], connection=connection)
    with hold_elsewhere("report:7"):
        job = build_report.delay(7)
        worker.work(burst=True)
        assert job.is_scheduled, job.get_status()
    assert written() == []
    queue.enqueue_job(job)
    worker.work(burst=True)
    assert written() == ["7"]


def apscheduler() -> None:
    from datetime import datetime

    from apscheduler.events import EVENT_JOB_EXECUTED
    from shop.reports import written
    from shop.tasks import nightly, scheduler

    done = threading.Event()
    scheduler.add_listener(lambda event: done.set(), EVENT_JOB_EXECUTED)
    scheduler.start()
    scheduler.modify_job("nightly", next_run_time=datetime.now(scheduler.timezone))
    assert done.wait(DEADLINE)
    scheduler.shutdown()
    nightly()
    assert written() == ["nightly"]


if __name__ == "__main__":
    django.setup()
    call_command("migrate", verbosity=0)
    # Some of what follows forks.
    connections.close_all()
    globals()[sys.argv[1]]()
