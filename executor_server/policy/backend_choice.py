"""Chooses the backends and images that the sessions of a profile can have in this daemon: a pure part of the policy.

A profile lists backends in order of preference; without a list its sessions run on the daemon's own. A name may mean an
image to several backends. One that does not have the image is passed over, and so is one that the daemon does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from executor_server.core import InvalidRequest, Reason, Violation, ViolationKind
from executor_server.policy.profile import Profile
from executor_server.policy.requested import RequestedSession
from executor_server.policy.violations import listed, not_allowed, rule_of

CONFIGURED_BACKEND = "server.backend"
"""The rule behind a refusal that no policy can change: a key of the daemon's configuration."""


class BackendChoice:
    """The backends of one daemon with the names of their images, its own backend first."""

    def __init__(self, images: Mapping[str, Sequence[str]]) -> None:
        assert images, "a daemon has a backend"
        self._images = {backend: tuple(names) for backend, names in images.items()}
        self.main = next(iter(self._images))

    def backends_of(self, profile: Profile) -> tuple[str, ...]:
        """The backends that serve the profile here, the preferred one first."""
        allowed = self._allowed(profile)
        return tuple(backend for backend in allowed if backend in self._images)

    def images_of(self, profile: Profile, backend: str = "") -> tuple[str, ...]:
        """The images that may be requested, here or on that backend; the first is the default.

        When no backend serves the profile, the images are those that it would have if all did.
        """
        served = self.backends_of(profile) or tuple(self._images)
        known = self._known_to([backend] if backend in served else served)
        wanted = profile.sandbox.images
        return known if wanted is None else tuple(name for name in wanted if name in known)

    def image_for(self, profile: Profile, request: RequestedSession) -> str:
        """The image of a session; empty when there is none."""
        return request.image or next(iter(self.images_of(profile, request.backend)), "")

    def order_for(self, profile: Profile, request: RequestedSession) -> tuple[str, ...]:
        """The backends to try for a session: those that have its image, only one when the client names it."""
        served, image = self.backends_of(profile), self.image_for(profile, request)
        candidates = [each for each in served if each == request.backend] if request.backend else served
        return tuple(each for each in candidates if image in self._images[each])

    def check_image(self, profile: Profile, request: RequestedSession) -> None:
        """Raises InvalidRequest for an image that does not exist; `violations` decides on one that does."""
        image, backend = request.image, request.backend
        if image and image not in self._known_to(self._images):
            allowed = listed(self.images_of(profile), "none")
            raise InvalidRequest(Reason.UNKNOWN_IMAGE, f"no image {image!r:.100}; available: {allowed}", "image")
        if image and backend in self.backends_of(profile) and image not in self._images[backend]:
            allowed = listed(self.images_of(profile, backend), "none")
            text = f"the {backend} backend has no image {image!r:.100}; available: {allowed}"
            raise InvalidRequest(Reason.UNKNOWN_IMAGE, text, "image")

    def violations(self, name: str, profile: Profile, request: RequestedSession) -> Iterator[Violation]:
        """Violations for a backend or an image that the profile of this name does not grant."""
        served = self.backends_of(profile)
        backend = request.backend
        if backend and backend not in self._images:  # no policy can grant a backend that this daemon does not run
            allowed = listed(served, "nothing")
            yield Violation("backend", ViolationKind.UNSUPPORTED, backend, allowed, CONFIGURED_BACKEND)
        elif not served or (backend and backend not in served):
            rule = rule_of(name, "sandbox.backends")
            yield not_allowed("backend", backend or self.main, self._allowed(profile), rule)
        images = self.images_of(profile, backend)
        if request.image not in images and (request.image or not images):
            is_elsewhere = served and request.image and request.image not in self._known_to(served)
            rule = rule_of(name, "sandbox.backends" if is_elsewhere else "sandbox.images")
            yield not_allowed("image", request.image or "the default image", images, rule)

    def _allowed(self, profile: Profile) -> tuple[str, ...]:
        return (self.main,) if profile.sandbox.backends is None else profile.sandbox.backends

    def _known_to(self, backends: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(image for backend in backends for image in self._images[backend]))
