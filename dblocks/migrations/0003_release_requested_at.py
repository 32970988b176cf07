from __future__ import annotations

from django.db import migrations

import dblocks.backends.database.fields


class Migration(migrations.Migration):
    dependencies = [("dblocks", "0002_min_until_max_until")]

    operations = [
        migrations.AddField(
            model_name="distributedlock",
            name="release_requested_at",
            field=dblocks.backends.database.fields.UTCDateTimeField(
                blank=True, null=True, verbose_name="release requested"
            ),
        ),
    ]
