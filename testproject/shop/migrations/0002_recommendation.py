from django.db import migrations, models

import dblocks.fencing


class Migration(migrations.Migration):
    dependencies = [
        ("shop", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Recommendation",
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
                    "fencing_token",
                    dblocks.fencing.FencingTokenField(default=0, editable=False),
                ),
                ("product", models.CharField(blank=True, max_length=100)),
                ("chosen_by", models.CharField(max_length=255)),
                ("chosen_at", models.DateTimeField(null=True)),
            ],
            options={
                "abstract": False,
            },
        ),
    ]
