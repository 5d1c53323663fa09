"""The protocols by which the daemon's parts take part in what happens in sessions, without knowing each other.

It owns the questions that are asked before something happens (admission), the notifications that are sent afterwards
(observer), and the queue of the executions of one session. It must not know who implements them.
"""

from executor_server.core.lifecycle.admission import AdmissionController, Answer, StateFacts
from executor_server.core.lifecycle.observer import Observer, Observers, SessionEnd, pass_on
from executor_server.core.lifecycle.running_queue import RunningQueue
