"""People for the shop's admin: one who may free locks and one who may look."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.models import Permission, User
from django.utils.crypto import get_random_string

PERMISSIONS = {
    "operator": ["view_distributedlock", "force_release_distributedlock"],
    "viewer": ["view_distributedlock"],
}


@dataclass(frozen=True, slots=True)
class Account:
    """Somebody who can log in to the admin."""

    username: str
    password: str


def make_operators() -> list[Account]:
    """Make the operator and the viewer, or give them new passwords."""
    return [_make(username, names) for username, names in PERMISSIONS.items()]


def _make(username: str, codenames: list[str]) -> Account:
    user, _created = User.objects.get_or_create(username=username)
    password = get_random_string(12)
    user.is_staff = user.is_active = True
    user.set_password(password)
    user.save()
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label="dblocks", codename__in=codenames
        )
    )
    return Account(username, password)
