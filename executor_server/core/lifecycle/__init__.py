"""Protocols through which the daemon's parts follow what happens in sessions, without knowing each other.

It owns the questions before an effect (admission), the notifications afterwards
(observer), and the queue of the executions of one session. It must not know their implementations.
"""

from executor_server.core.lifecycle.admission import AdmissionController, Answer, StateFacts
from executor_server.core.lifecycle.observer import Observer, Observers, SessionEnd, pass_on
from executor_server.core.lifecycle.running_queue import RunningQueue
