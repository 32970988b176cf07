from __future__ import annotations

from django.db import migrations, models

import dblocks.backends.database.fields


class Migration(migrations.Migration):
    dependencies = [("dblocks", "0003_release_requested_at")]

    operations = [
        migrations.CreateModel(
            name="Intervention",
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
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("force_release", "Force Release"),
                            ("request", "Request"),
                        ],
                        max_length=20,
                    ),
                ),
                (
                    "key",
                    dblocks.backends.database.fields.ExactCharField(max_length=255),
                ),
                (
                    "holder",
                    dblocks.backends.database.fields.ExactCharField(
                        blank=True, max_length=255
                    ),
                ),
                ("version", models.BigIntegerField()),
                (
                    "by",
                    dblocks.backends.database.fields.ExactCharField(
                        blank=True, max_length=255
                    ),
                ),
                ("reason", models.TextField(blank=True)),
                ("at", dblocks.backends.database.fields.UTCDateTimeField()),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["key"], name="dblocks_intervention_key")
                ],
            },
        ),
    ]
