from __future__ import annotations

from django.db import migrations

import dblocks.backends.database.fields


class Migration(migrations.Migration):
    dependencies = [("dblocks", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="distributedlock",
            name="min_until",
            field=dblocks.backends.database.fields.UTCDateTimeField(
                blank=True, null=True, verbose_name="kept until"
            ),
        ),
        migrations.AddField(
            model_name="distributedlock",
            name="max_until",
            field=dblocks.backends.database.fields.UTCDateTimeField(
                blank=True, null=True, verbose_name="held no longer than"
            ),
        ),
    ]
