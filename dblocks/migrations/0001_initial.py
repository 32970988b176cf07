from __future__ import annotations

from django.db import migrations, models, router

import dblocks.backends.database.fields


def make_floor(apps, schema_editor):  # type: ignore[no-untyped-def]
    alias = schema_editor.connection.alias
    floor = apps.get_model("dblocks", "TokenFloor")
    if router.allow_migrate_model(alias, floor):
        floor.objects.using(alias).get_or_create(pk=1)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="TokenFloor",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("value", models.BigIntegerField(default=0)),
            ],
            options={"default_permissions": ()},
        ),
        migrations.RunPython(make_floor, migrations.RunPython.noop, elidable=False),
        migrations.CreateModel(
            name="DistributedLock",
            fields=[
                (
                    "key",
                    dblocks.backends.database.fields.ExactCharField(
                        max_length=255,
                        primary_key=True,
                        serialize=False,
                        verbose_name="key",
                    ),
                ),
                (
                    "owner",
                    dblocks.backends.database.fields.ExactCharField(
                        blank=True, default="", max_length=64, verbose_name="owner"
                    ),
                ),
                (
                    "holder",
                    dblocks.backends.database.fields.ExactCharField(
                        blank=True, default="", max_length=255, verbose_name="holder"
                    ),
                ),
                (
                    "note",
                    dblocks.backends.database.fields.ExactCharField(
                        blank=True, default="", max_length=255, verbose_name="note"
                    ),
                ),
                (
                    "hold_count",
                    models.IntegerField(default=0, verbose_name="hold count"),
                ),
                (
                    "version",
                    models.BigIntegerField(default=0, verbose_name="version"),
                ),
                (
                    "acquired_at",
                    dblocks.backends.database.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="held since"
                    ),
                ),
                (
                    "expires_at",
                    dblocks.backends.database.fields.UTCDateTimeField(
                        verbose_name="expires at"
                    ),
                ),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "permissions": [
                    ("force_release_distributedlock", "Can force release lock")
                ],
                "default_permissions": ("view",),
                "constraints": [
                    dblocks.backends.database.fields.GuardConstraint(
                        fields=("key", "version"), name="dblocks_key_version"
                    )
                ],
            },
        ),
    ]
